/**
 * Colours and patterns of areas. Those of categories are the ones of `memlab/figures/look.py`, so
 * that a page and a notebook's figures look alike.
 *
 * @typedef {"" | "dots" | "falling" | "rising"} Pattern "rising" is kept for what is over the limit
 *
 * @typedef {object} Style
 * @property {string} name
 * @property {string} label
 * @property {string} colour
 * @property {Pattern} pattern
 */

/**
 * From bottom to top, the categories that live longest first. Okabe and Ito's palette, softened;
 * where people with some kind of colour vision see two of them alike, a pattern tells them apart.
 *
 * @type {readonly Style[]}
 */
export const CATEGORY_STYLES = [
  { name: "parameters", label: "parameters", colour: "#3c7fb5", pattern: "" },
  { name: "buffers", label: "buffers", colour: "#8b98a5", pattern: "dots" },
  { name: "optimizer_state", label: "optimizer state", colour: "#bd87ae", pattern: "" },
  { name: "inputs", label: "inputs", colour: "#e2d265", pattern: "dots" },
  { name: "gradients", label: "gradients", colour: "#35967a", pattern: "falling" },
  { name: "activations", label: "activations", colour: "#e6a33e", pattern: "" },
  { name: "temporaries", label: "temporaries", colour: "#86c3e6", pattern: "" },
];

/**
 * Colours of modules in the order of the stack, to be begun again after the last. A search over
 * orders made the least difference of neighbours, and of those with one between them, as large as
 * it gets for every kind of colour vision.
 */
export const MODULE_COLOURS = [
  "#c9b8e8",
  "#2b6c74",
  "#e6a33e",
  "#86c3e6",
  "#7d5a3c",
  "#4477aa",
  "#f0c9a0",
  "#8b98a5",
  "#b5543c",
  "#e2d265",
  "#6a5a9e",
  "#e79a92",
];

/** The colour of the module at a place of the stack. @param {number} at */
export const moduleColour = (at) => MODULE_COLOURS[at % MODULE_COLOURS.length];

/** The colour of text on an area: black or white, whose contrast is 4.5 at least. @param {string} colour */
export const inkOn = (colour) =>
  contrast(colour, "#000000") >= contrast(colour, "#ffffff") ? "#000000" : "#ffffff";

/** WCAG's contrast of two colours, such as "#3c7fb5". @param {string} a @param {string} b */
export function contrast(a, b) {
  const [dark, light] = [luminance(a), luminance(b)].sort((one, other) => one - other);
  return (light + 0.05) / (dark + 0.05);
}

/** @param {string} colour */
function luminance(colour) {
  const [red, green, blue] = [1, 3, 5].map((at) => {
    const value = parseInt(colour.slice(at, at + 2), 16) / 255;
    return value <= 0.04045 ? value / 12.92 : ((value + 0.055) / 1.055) ** 2.4;
  });
  return 0.2126 * red + 0.7152 * green + 0.0722 * blue;
}
