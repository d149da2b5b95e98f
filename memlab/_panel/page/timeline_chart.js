/**
 * The timeline of a training step as a chart to look at, to point at and to zoom into.
 *
 * A pointer or a finger shows a reading, a click keeps it. Drag over a part to zoom into it, drag
 * again to pan; wheel with Ctrl, or once the chart has the focus; pinch; double click for the whole.
 * Keys: arrows by a column, with Shift by ten, Page by a tenth of the width, Home and End, P for the
 * peak, +, - and 0.
 *
 * @typedef {import("./timeline_picture.js").Scene} Scene
 * @typedef {import("./timeline_picture.js").Theme} Theme
 * @typedef {import("./timeline_picture.js").Pen} Pen
 * @typedef {import("./timeline_picture.js").Size} Size
 * @typedef {import("./layout.js").Range} Range
 *
 * @typedef {object} Callbacks
 * @property {(instant: number) => void} [onSelect]
 * @property {(instant: number | null) => void} [onPoint]
 * @property {(view: Range) => void} [onZoom]
 */

import { SvgPen, toCsv } from "./export.js";
import { listen } from "./gestures.js";
import { clamped, instantAt } from "./layout.js";
import { drawOverlay } from "./timeline_overlay.js";
import { arranged, draw, fillBox, geometryOf } from "./timeline_picture.js";

/** @type {Range} */
const WHOLE = [0, 1];
const FEWEST_INSTANTS = 8; // that a zoomed picture shows
const ROLE = {
  role: "slider",
  "aria-valuemin": "0",
  "aria-valuemax": "0",
  "aria-valuenow": "0",
  "aria-valuetext": "",
};
const USUAL_COLOURS = {
  ink: "#26262a",
  quiet: "#6a696a",
  line: "#e2e1e2",
  paper: "#ffffff",
  bad: "#c2273d",
};
let count = 0;

export class TimelineChart {
  /** @type {Scene | null} */
  scene = null;
  /** What is on screen. @type {import("./timeline_picture.js").Arranged | null} */
  at = null;
  /** @type {Range} */
  view = WHOLE;
  /** @type {Theme | null} */
  theme = null;
  /** @type {import("./timeline_picture.js").Memory} */
  memory = { top: 0, places: new Map() };
  /** @type {number | null} */
  selected = null;
  /** @type {number | null} */
  pointed = null;
  /** What is being dragged over. @type {Range | null} */
  range = null;
  isOld = false;
  frame = 0;
  id = `memlab-timeline-${(count += 1)}`;
  stop = new AbortController();

  /**
   * @param {HTMLElement} root empty, with a height
   * @param {Callbacks} [callbacks]
   */
  constructor(root, callbacks = {}) {
    this.root = root;
    this.callbacks = callbacks;
    this.picture = layer(root);
    this.overlay = layer(root);
    if (getComputedStyle(root).position === "static") root.style.position = "relative";
    root.style.touchAction = "pan-y"; // a page still scrolls under a finger
    root.style.userSelect = "none";
    root.tabIndex = 0;
    root.dataset.lmSuppressShortcuts = "true"; // JupyterLab would act on the cell
    // a slider over instants, whose value is the reading
    for (const [name, value] of Object.entries(ROLE)) root.setAttribute(name, value);
    this.watch();
    listen(this, root, this.stop.signal);
  }

  /** Draws a scene in the next frame; the newest wins. @param {Scene} scene */
  show(scene) {
    const before = this.scene?.timeline;
    const isRead = this.selected !== null || this.pointed !== null;
    if (before && before !== scene.timeline && isRead) {
      // what was selected stays where it is in the step
      const [was, now] = [geometryOf(before).x, geometryOf(scene.timeline).x];
      const moved = (/** @type {number | null} */ at) =>
        at === null || !now.length ? null : instantAt(now, was[at]);
      [this.selected, this.pointed] = [moved(this.selected), moved(this.pointed)];
    }
    this.scene = scene;
    this.changeTheme();
  }

  /** Selects without a callback. @param {number | null} instant */
  select(instant) {
    const length = this.scene?.timeline.total.length ?? 0;
    this.selected =
      instant === null || !length ? null : clamped(Math.round(instant), 0, length - 1);
    this.redrawOverlay();
  }

  destroy() {
    this.stop.abort();
    cancelAnimationFrame(this.frame);
    this.picture.remove();
    this.overlay.remove();
    for (const name of [...Object.keys(ROLE), "tabindex", "aria-label"])
      this.root.removeAttribute(name);
  }

  /** The picture with its ground, two pixels for each of the page at least. @returns {Promise<Blob>} */
  toPng() {
    const size = { ...this.size(), density: Math.max(2, devicePixelRatio) };
    const canvas = document.createElement("canvas");
    this.drawOn(penOf(canvas, size), size);
    return new Promise((resolve, reject) => {
      canvas.toBlob((blob) =>
        blob ? resolve(blob) : reject(new Error("the browser made no PNG")),
      );
    });
  }

  /** The picture with its ground, its text as text. */
  toSvg() {
    const size = { ...this.size(), density: 2 };
    const ruler = /** @type {CanvasRenderingContext2D} */ (
      document.createElement("canvas").getContext("2d")
    );
    const pen = new SvgPen(ruler, this.id);
    this.drawOn(/** @type {any} */ (pen), size);
    return pen.toSvg(size.width, size.height, this.scene?.label ?? "");
  }

  /** Every instant and every area, not only what is on screen. */
  toCsv() {
    return this.scene ? toCsv(this.scene) : "";
  }

  /** @param {Pen} pen @param {Size} size */
  drawOn(pen, size) {
    const theme = this.readTheme();
    const memory = { top: this.memory.top, places: new Map(this.memory.places) };
    fillBox(pen, theme.paper, [0, 0, size.width, size.height]);
    if (this.scene) draw(pen, arranged(this.scene, size, this.view, memory), theme, memory);
  }

  // How it comes on screen.

  /** Draws again what a change of size or theme spoils. */
  watch() {
    const { signal } = this.stop;
    const sizes = new ResizeObserver(() => this.redraw());
    const themes = new MutationObserver(() => this.changeTheme());
    const attributeFilter = ["class", "style", "theme", "data-theme", "data-jp-theme-name"];
    sizes.observe(this.root);
    for (const element of [document.documentElement, document.body])
      themes.observe(element, { attributeFilter });
    matchMedia("(prefers-color-scheme: dark)").addEventListener(
      "change",
      () => this.changeTheme(),
      { signal },
    );
    signal.addEventListener("abort", () =>
      [sizes, themes].forEach((observer) => observer.disconnect()),
    );
  }

  /** @returns {Size} */
  size() {
    const { clientWidth, clientHeight } = this.root;
    return {
      width: Math.max(clientWidth, 120),
      height: Math.max(clientHeight, 120),
      density: devicePixelRatio || 1,
    };
  }

  /** @returns {Theme} */
  readTheme() {
    // the colour of an element is always one that a canvas understands; a variable need not be
    const probe = this.root.appendChild(document.createElement("i"));
    const colours = Object.entries(USUAL_COLOURS).map(([name, usual]) => {
      probe.style.color = `var(--ml-${name}, ${usual})`;
      return [name, getComputedStyle(probe).color];
    });
    probe.remove();
    const font = getComputedStyle(this.root).fontFamily || "sans-serif";
    return { ...Object.fromEntries(colours), font };
  }

  changeTheme() {
    this.theme = null;
    this.redraw();
  }

  redraw() {
    this.isOld = true;
    this.redrawOverlay();
  }

  redrawOverlay() {
    this.frame ||= requestAnimationFrame(() => this.render());
  }

  render() {
    this.frame = 0;
    if (!this.scene) return;
    const size = this.size();
    this.theme ??= this.readTheme();
    if (this.isOld || !this.at) {
      this.isOld = false;
      this.at = arranged(this.scene, size, this.view, this.memory);
      draw(penOf(this.picture, size), this.at, this.theme, this.memory);
    }
    const { selected, pointed, range } = this;
    const isFocused = this.root.matches(":focus");
    drawOverlay(penOf(this.overlay, size), this.at, this.theme, {
      selected,
      pointed,
      range,
      isFocused,
    });
    this.announce(this.scene);
  }

  /** What it says to those who cannot see it. @param {Scene} scene */
  announce(scene) {
    const { root, selected } = this;
    const reading = selected === null ? null : scene.describe(selected);
    const said = {
      "aria-label": [scene.label, scene.dimmed].filter(Boolean).join(". "),
      "aria-valuemax": String(Math.max(scene.timeline.total.length - 1, 0)),
      "aria-valuenow": String(selected ?? 0),
      "aria-valuetext": reading
        ? [reading.title, ...reading.lines].join(", ")
        : "nothing selected; P selects the peak",
    };
    for (const [name, text] of Object.entries(said)) {
      if (root.getAttribute(name) !== text) root.setAttribute(name, text);
    }
  }

  // What gestures ask and do.

  get isZoomed() {
    return this.view[1] - this.view[0] < 1;
  }

  /** Where in the step a pixel from the left of root is. @param {number} x */
  placeOf(x) {
    const { left, right } = /** @type {NonNullable<typeof this.at>} */ (this.at);
    const share = clamped((x - left) / (right - left), 0, 1);
    return this.view[0] + share * (this.view[1] - this.view[0]);
  }

  /** The highest instant at a pixel from the left of root. @param {number} x */
  instantOf(x) {
    if (!this.at?.x.length) return null;
    const { left, right, columns, rows } = this.at;
    return rows[clamped(Math.floor(((x - left) / (right - left)) * columns), 0, columns - 1)];
  }

  /** Shows a part of the step, or as much of it as there is. @param {Range} view */
  zoomTo([from, to]) {
    const least = Math.min(
      1,
      FEWEST_INSTANTS / Math.max(this.scene?.timeline.total.length ?? 1, 1),
    );
    const wide = clamped(to - from, least, 1);
    const start = clamped((from + to - wide) / 2, 0, 1 - wide);
    this.view = [start, start + wide];
    this.redraw();
    this.callbacks.onZoom?.(this.view);
  }

  /** Shows a part of the same width that begins at a place. @param {number} from */
  moveTo(from) {
    const wide = this.view[1] - this.view[0];
    const start = clamped(from, 0, 1 - wide);
    this.zoomTo([start, start + wide]);
  }

  /** @param {number} place which stays where it is @param {number} factor above 1 shows less */
  zoomAt(place, factor) {
    const [from, to] = this.view;
    const wide = Math.min((to - from) / factor, 1);
    const start = clamped(place - clamped((place - from) / (to - from), 0, 1) * wide, 0, 1 - wide);
    this.zoomTo([start, start + wide]);
  }

  /** @param {number | null} instant */
  point(instant) {
    if (instant === this.pointed) return;
    this.pointed = instant;
    this.redrawOverlay();
    this.callbacks.onPoint?.(instant);
  }

  /** Points without a callback. @param {number | null} instant */
  follow(instant) {
    this.pointed = instant;
    this.redrawOverlay();
  }

  /** @param {Range | null} range */
  mark(range) {
    this.range = range;
    this.redrawOverlay();
  }

  /** Selects an instant, shows it and says so. @param {number | null} instant */
  choose(instant) {
    this.point(null); // a pointer that rests must not hide the reading of a key
    this.select(instant);
    if (this.selected === null || !this.at) return;
    const [from, to] = this.view;
    const place = geometryOf(this.at.scene.timeline).x[this.selected];
    if (place < from || place > to) this.moveTo(place - (to - from) / 2);
    this.callbacks.onSelect?.(this.selected);
  }

  /** Selects so many columns farther, and begins at the peak. @param {number} columns */
  step(columns) {
    const { at, selected } = this;
    if (!at) return;
    if (selected === null) return this.choose(at.peak);
    const [from, to] = this.view;
    const wide = (to - from) / at.columns;
    const column = Math.floor((at.x[selected] - from) / wide) + columns;
    const found = at.rows[column] ?? instantAt(at.x, from + (column + 0.5) * wide);
    // an instant wider than a column is left all the same
    this.choose(columns > 0 ? Math.max(found, selected + 1) : Math.min(found, selected - 1));
  }
}

/** @param {HTMLElement} root */
function layer(root) {
  const canvas = document.createElement("canvas");
  canvas.style.cssText = "position:absolute;inset:0;width:100%;height:100%;pointer-events:none";
  root.append(canvas);
  return canvas;
}

/** A cleared canvas, to be drawn on in CSS pixels. @param {HTMLCanvasElement} canvas @param {Size} size */
function penOf(canvas, { width, height, density }) {
  const [wide, high] = [Math.round(width * density), Math.round(height * density)];
  // a canvas is cleared, and made anew, by any size that is set
  if (canvas.width !== wide || canvas.height !== high)
    Object.assign(canvas, { width: wide, height: high });
  const pen = /** @type {CanvasRenderingContext2D} */ (canvas.getContext("2d"));
  pen.setTransform(density, 0, 0, density, 0, 0);
  pen.clearRect(0, 0, width, height);
  return pen;
}
