/**
 * A timeline's picture as SVG and its numbers as CSV.
 *
 * @typedef {import("./timeline_picture.js").Scene} Scene
 */

import { PHASES } from "./recorded_step.js";

/** Draws as a canvas does, as far as `timeline_picture.js` asks, and gives SVG. */
export class SvgPen {
  fillStyle = "#000000";
  strokeStyle = "#000000";
  font = "";
  textAlign = "left";
  lineWidth = 1;
  globalAlpha = 1;
  path = "";
  dashes = "";
  clipping = "";
  /** @type {string[]} */
  parts = [];
  /** By id. @type {Record<string, string>} */
  definitions = {};

  /**
   * @param {CanvasRenderingContext2D} ruler measures text
   * @param {string} prefix of ids, since one page can hold many pictures
   */
  constructor(ruler, prefix) {
    this.ruler = ruler;
    this.prefix = prefix;
  }

  // The picture saves nothing but where it clips.
  save() {}

  restore() {
    this.clipping = "";
  }

  clip() {
    const id = `${this.prefix}-clip`;
    this.definitions[id] = `<clipPath id="${id}"><path d="${this.path}"/></clipPath>`;
    this.clipping = ` clip-path="url(#${id})"`;
  }

  /** @param {number[]} dashes */
  setLineDash(dashes) {
    this.dashes = dashes.length ? ` stroke-dasharray="${dashes}"` : "";
  }

  beginPath() {
    this.path = "";
  }

  /** @param {number} x @param {number} y */
  lineTo(x, y) {
    this.path += `${this.path ? "L" : "M"}${short(x)} ${short(y)}`;
  }

  closePath() {
    this.path += "Z";
  }

  /** @param {number} x @param {number} y @param {number} width @param {number} height */
  rect(x, y, width, height) {
    this.path += `M${short(x)} ${short(y)}h${short(width)}v${short(height)}h${short(-width)}Z`;
  }

  /** A whole circle. @param {number} x @param {number} y @param {number} radius */
  arc(x, y, radius) {
    const half = `a${radius} ${radius} 0 1 0`;
    this.path += `M${short(x - radius)} ${short(y)}${half} ${2 * radius} 0${half} ${-2 * radius} 0Z`;
  }

  fill() {
    this.add("path", `d="${this.path}" fill="${escaped(this.fillStyle)}"`);
  }

  stroke() {
    const style = `stroke="${escaped(this.strokeStyle)}" stroke-width="${this.lineWidth}"${this.dashes}`;
    this.add("path", `d="${this.path}" fill="none" stroke-linejoin="round" ${style}`);
  }

  /** @param {string} text @param {number} x @param {number} y */
  fillText(text, x, y) {
    const anchor = { center: "middle", right: "end" }[this.textAlign] ?? "start";
    const place = `x="${short(x)}" y="${short(y)}" text-anchor="${anchor}" dominant-baseline="central"`;
    this.add(
      "text",
      `${place} fill="${escaped(this.fillStyle)}" style="font:${escaped(this.font)}"`,
      escaped(text),
    );
  }

  /** @param {string} text */
  measureText(text) {
    this.ruler.font = this.font;
    return this.ruler.measureText(text);
  }

  /** @param {string} name @param {number[][]} strokes @param {number} size of the tile @param {string} colour */
  texture(name, strokes, size, colour) {
    const id = `${this.prefix}-${name}-${colour.replace(/\W/g, "")}`;
    const d = strokes.map(([x0, y0, x1, y1]) => `M${x0} ${y0}L${x1} ${y1}`).join("");
    const tile = `id="${id}" width="${size}" height="${size}" patternUnits="userSpaceOnUse"`;
    this.definitions[id] =
      `<pattern ${tile}><path d="${d}" stroke="${escaped(colour)}"/></pattern>`;
    return `url(#${id})`;
  }

  /** @param {string} tag @param {string} attributes @param {string} [inside] */
  add(tag, attributes, inside = "") {
    const alpha = this.globalAlpha < 1 ? ` opacity="${this.globalAlpha}"` : "";
    this.parts.push(`<${tag} ${attributes}${alpha}${this.clipping}>${inside}</${tag}>`);
  }

  /** The picture. @param {number} width @param {number} height @param {string} label */
  toSvg(width, height, label) {
    const box = `width="${width}" height="${height}" viewBox="0 0 ${width} ${height}"`;
    const inside = `<title>${escaped(label)}</title><defs>${Object.values(this.definitions).join("")}</defs>`;
    return `<svg xmlns="http://www.w3.org/2000/svg" role="img" ${box}>${inside}${this.parts.join("")}</svg>`;
  }
}

/** Every instant with the bytes of each area, in exact bytes. @param {Scene} scene */
export function toCsv({ timeline, groups }) {
  const names = groups.map(({ name }) => quoted(`${name}_bytes`));
  const lines = [
    ["instant", "phase", "micro_batch", "operator", "total_bytes", ...names].join(","),
  ];
  for (let at = 0; at < timeline.total.length; at += 1) {
    const where = [at, PHASES[timeline.phase[at]], timeline.microBatch[at], timeline.operator[at]];
    lines.push([...where, timeline.total[at], ...groups.map(({ held }) => held[at])].join(","));
  }
  return `${lines.join("\n")}\n`;
}

/** @param {number} value */
const short = (value) => Number(value.toFixed(2));

/** @param {string} text */
const quoted = (text) => (/[",\n]/.test(text) ? `"${text.replaceAll('"', '""')}"` : text);

/** @param {string} text */
const escaped = (text) => text.replace(/[&<>"]/g, (sign) => `&#${sign.charCodeAt(0)};`);
