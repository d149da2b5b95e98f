/**
 * The picture of a step's memory: areas on one another, lines, limit, peak, and their words. It is
 * drawn on a canvas, or on an `SvgPen` that understands the same calls.
 *
 * @typedef {import("./recorded_step.js").Timeline} Timeline
 * @typedef {import("./colours.js").Style} Style
 * @typedef {import("./layout.js").Range} Range
 * @typedef {CanvasRenderingContext2D & {texture?: (name: string, strokes: number[][], size: number, colour: string) => any}} Pen
 *
 * @typedef {Style & {held: Float64Array}} Group an area; `held` has a value for each instant
 *
 * @typedef {object} Scene
 * @property {Timeline} timeline
 * @property {Group[]} groups from bottom to top
 * @property {number | null} limitBytes
 * @property {string} [limitOf] the device whose limit it is, where the page does not say it beside
 * @property {Timeline | null} before a line "before the last move"
 * @property {Timeline | null} measured a line over the areas, aligned by operator
 * @property {{bytes: number, kept: {top: number}} | null} [scale] that two pictures share: the most
 *     bytes that either draws, and what should not change without need
 * @property {string} dimmed a sentence over the greyed picture; "" if it is valid
 * @property {(instant: number) => {title: string, lines: string[]}} describe the title says where
 * @property {string} label the picture's name with its numbers, for those who cannot see it
 *
 * @typedef {object} Theme
 * @property {string} ink
 * @property {string} quiet
 * @property {string} line
 * @property {string} paper
 * @property {string} bad
 * @property {string} font family
 *
 * @typedef {object} Size
 * @property {number} width in CSS pixels
 * @property {number} height
 * @property {number} density device pixels in one of these
 *
 * @typedef {object} Memory what the next picture should not change without need
 * @property {number} top bytes
 * @property {Map<string, number>} places of labels by group, as a share of the width
 *
 * @typedef {ReturnType<typeof arranged>} Arranged
 */

import { inkOn } from "./colours.js";
import * as layout from "./layout.js";
import { highest } from "./numbers.js";
import { PHASES } from "./recorded_step.js";
import { formatBytes } from "./words.js";

const FONT_SIZE = 12;
const ROW = 18;
const [LEFT, RIGHT] = [68, 10]; // margins
const PHASE_TONES = [0, 0.06, 0.12, 0.22, 0.34, 0];
const STAGE_TONES = [0.08, 0.2]; // by turns
const FORWARD = PHASES.indexOf("forward");
/** @type {Record<string, string>} */
const SHORT = {
  ...{ forward: "fwd", backward: "bwd", optimizer: "opt" },
  ...{ "first step": "first", evaluation: "eval", generation: "gen" },
};
const NEEDLE = 3; // pixels: a narrower peak is easily missed
const DASHES = [4, 3];
const TILE = 6;
/** Strokes in a tile. @type {Record<string, number[][]>} */
const TEXTURES = {
  dots: [
    [1, 1.5, 2, 1.5],
    [4, 4.5, 5, 4.5],
  ],
  falling: [
    [0, 0, 6, 6],
    [-1, 5, 1, 7],
    [5, -1, 7, 1],
  ],
  rising: [
    [0, 6, 6, 0],
    [-1, 1, 1, -1],
    [5, 7, 7, 5],
  ],
};

/** @type {WeakMap<Timeline, ReturnType<typeof studied>>} */
const known = new WeakMap();
/** @type {WeakMap<Group[], {rows: Int32Array, tops: Float64Array[]}>} */
const stacks = new WeakMap();

/** @param {Timeline} timeline @param {Timeline} reference whose axis it is drawn on */
function studied(timeline, reference) {
  const axis = layout.axisOf(reference);
  const x = layout.positions(timeline, axis);
  const { total } = timeline;
  let peak = 0;
  for (let at = 1; at < total.length; at += 1) if (total[at] > total[peak]) peak = at;
  return { reference, axis, x, peak, peakBytes: total[peak] ?? 0, key: "", rows: new Int32Array() };
}

/** What is found once for a timeline. @param {Timeline} timeline @param {Timeline} [reference] */
export function geometryOf(timeline, reference = timeline) {
  let found = known.get(timeline);
  if (found?.reference !== reference) known.set(timeline, (found = studied(timeline, reference)));
  return found;
}

/** @param {Timeline} timeline @param {Timeline} reference @param {Range} view @param {number} columns */
function rowsOf(timeline, reference, view, columns) {
  const found = geometryOf(timeline, reference);
  const key = `${view} ${columns}`;
  if (found.key !== key) found.rows = layout.columnsOf(found.x, timeline.total, view, columns);
  found.key = key;
  return found.rows;
}

/** @param {Group[]} groups @param {Int32Array} rows */
function topsOf(groups, rows) {
  let found = stacks.get(groups);
  if (found?.rows !== rows)
    stacks.set(groups, (found = { rows, tops: layout.stacked(groups, rows) }));
  return found.tops;
}

/**
 * Everything that is drawn, in its place.
 *
 * @param {Scene} scene
 * @param {Size} size
 * @param {Range} view
 * @param {Memory} memory
 */
export function arranged(scene, size, view, memory) {
  const { timeline, before, measured, limitBytes, groups } = scene;
  const { width, height, density } = size;
  const keyRows = width < 560 || groups.length > 8 || scene.scale ? 2 : 1;
  const [left, right] = [LEFT, Math.max(width - RIGHT, LEFT + 10)];
  const top = ROW * (keyRows + 1) + 6;
  const bottom = Math.max(height - 2 * ROW - 8, top + 10);
  const columns = Math.round((right - left) * density);

  const own = geometryOf(timeline);
  const others = [before && geometryOf(before), measured && geometryOf(measured, timeline)];
  const peaks = others.map((other) => other?.peakBytes ?? 0);
  const drawn = Math.max(own.peakBytes, ...peaks, scene.scale?.bytes ?? 0);
  // a limit far above the peak would flatten it
  const isLimitShown = limitBytes !== null && limitBytes <= 2 * drawn;
  const most = isLimitShown ? Math.max(drawn, limitBytes) : drawn;
  const kept = scene.scale?.kept ?? memory;
  const scale = layout.scaleOf(most, kept.top, (bottom - top) / 36);
  kept.top = scale.top;

  /** @param {Timeline} line @param {Timeline} reference */
  const heights = (line, reference) =>
    Float64Array.from(rowsOf(line, reference, view, columns), (row) => line.total[row]);
  const rows = rowsOf(timeline, timeline, view, columns);
  return {
    ...{ scene, size, view, left, right, top, bottom, columns, keyRows, scale, isLimitShown, rows },
    ...{ x: own.x, axis: own.axis, peak: own.peak, peakBytes: own.peakBytes },
    tops: topsOf(groups, rows),
    total: heights(timeline, timeline),
    before: before && heights(before, before),
    measured: measured && heights(measured, timeline),
    /** @param {number} place 0..1 of the step */
    xOf: (place) => left + ((place - view[0]) / (view[1] - view[0])) * (right - left),
    /** @param {number} bytes on a device pixel, so that edges are sharp */
    yOf: (bytes) => Math.round((bottom - (bytes / scale.top) * (bottom - top)) * density) / density,
  };
}

/** @param {Pen} pen @param {Arranged} at @param {Theme} theme @param {Memory} memory */
export function draw(pen, at, theme, memory) {
  setFont(pen, theme);
  pen.lineJoin = "round";
  if (at.x.length) {
    drawGrid(pen, at, theme);
    drawAreas(pen, at);
    drawOverLimit(pen, at, theme);
    if (at.before) drawLine(pen, at, at.before, theme, DASHES);
    if (at.measured) drawLine(pen, at, at.measured, theme, []);
    drawKey(pen, at, drawLabels(pen, at, memory), theme);
    drawLimit(pen, at, theme);
    drawBands(pen, at, theme);
    drawPeak(pen, at, theme);
    drawZoom(pen, at, theme);
  }
  if (at.scene.dimmed) drawDimmed(pen, at, theme);
}

/** @param {Pen} pen @param {Theme} theme @param {string} [weight] */
export function setFont(pen, theme, weight = "normal") {
  pen.font = `${weight} ${FONT_SIZE}px ${theme.font}`;
  pen.textBaseline = "middle";
}

/** @param {Pen} pen @param {string} text @param {number} x @param {number} y @param {string} colour @param {CanvasTextAlign} [align] */
export function write(pen, text, x, y, colour, align = "left") {
  pen.fillStyle = colour;
  pen.textAlign = align;
  pen.fillText(text, x, y);
}

/** Fills the path. @param {Pen} pen @param {any} style @param {number} [alpha] */
export function fill(pen, style, alpha = 1) {
  pen.globalAlpha = alpha;
  pen.fillStyle = style;
  pen.fill();
  pen.globalAlpha = 1;
}

/** Draws along the path. @param {Pen} pen @param {string} colour @param {number} wide @param {number[]} [dashes] */
export function stroke(pen, colour, wide, dashes = []) {
  pen.strokeStyle = colour;
  pen.lineWidth = wide;
  pen.setLineDash(dashes);
  pen.stroke();
}

/** Begins a path. @param {Pen} pen @param {number[][]} points */
export function path(pen, points) {
  pen.beginPath();
  for (const [x, y] of points) pen.lineTo(x, y);
}

/** @param {Pen} pen @param {any} style @param {number[]} box x, y, width and height @param {number} [alpha] */
export function fillBox(pen, style, [x, y, wide, high], alpha = 1) {
  pen.beginPath();
  pen.rect(x, y, wide, high);
  fill(pen, style, alpha);
}

/** @param {Pen} pen @param {Arranged} at @param {Theme} theme */
function drawGrid(pen, at, theme) {
  for (const { bytes, text } of at.scale.ticks) {
    const y = at.yOf(bytes) + 0.5;
    path(pen, [
      [at.left, y],
      [at.right, y],
    ]);
    stroke(pen, theme.line, 1);
    write(pen, text, at.left - 8, y, theme.quiet, "right");
  }
}

/** Goes on with a path, along the upper edge of columns. @param {Pen} pen @param {Arranged} at @param {Float64Array} heights */
function follow(pen, at, heights) {
  const wide = (at.right - at.left) / at.columns;
  let last = at.yOf(heights[0]);
  pen.lineTo(at.left, last);
  for (let column = 1; column < heights.length; column += 1) {
    const y = at.yOf(heights[column]);
    if (y === last) continue;
    pen.lineTo(at.left + column * wide, last);
    pen.lineTo(at.left + column * wide, y);
    last = y;
  }
  pen.lineTo(at.right, last);
}

/** @param {Pen} pen @param {Arranged} at @param {Float64Array} heights */
function areaUnder(pen, at, heights) {
  path(pen, [[at.left, at.bottom]]);
  follow(pen, at, heights);
  pen.lineTo(at.right, at.bottom);
  pen.closePath();
}

/** Fills the path as an area. @param {Pen} pen @param {Group} group */
function fillAs(pen, { colour, pattern }) {
  fill(pen, colour);
  if (pattern) fill(pen, texture(pen, pattern, inkOn(colour)), 0.25);
}

/** Each area down to the axis, the uppermost first: so there are no seams. @param {Pen} pen @param {Arranged} at */
function drawAreas(pen, at) {
  for (let number = at.tops.length - 1; number >= 0; number -= 1) {
    areaUnder(pen, at, at.tops[number]);
    fillAs(pen, at.scene.groups[number]);
  }
}

/** @param {Pen} pen @param {string} name @param {string} colour @returns {any} a fill style */
function texture(pen, name, colour) {
  if (pen.texture) return pen.texture(name, TEXTURES[name], TILE, colour);
  const side = Math.round(TILE * pen.getTransform().a);
  const canvas = new OffscreenCanvas(side, side);
  const tile = /** @type {any} */ (canvas.getContext("2d"));
  tile.scale(side / TILE, side / TILE);
  for (const [x0, y0, x1, y1] of TEXTURES[name]) {
    path(tile, [
      [x0, y0],
      [x1, y1],
    ]);
    stroke(tile, colour, 1);
  }
  const made = /** @type {CanvasPattern} */ (pen.createPattern(canvas, "repeat"));
  made.setTransform(new DOMMatrix().scale(TILE / side));
  return made;
}

/** @param {Pen} pen @param {Arranged} at @param {Theme} theme */
function drawOverLimit(pen, at, theme) {
  const limit = at.scene.limitBytes;
  if (limit === null || !at.isLimitShown || at.peakBytes <= limit) return;
  pen.save();
  path(pen, []);
  pen.rect(at.left, 0, at.right - at.left, at.yOf(limit));
  pen.clip();
  areaUnder(pen, at, at.total);
  fill(pen, theme.paper, 0.5);
  fill(pen, texture(pen, "rising", theme.bad));
  stroke(pen, theme.bad, 1.2); // or a needle would be a few dots
  pen.restore();
}

/** A line with a halo is visible on any area. @param {Pen} pen @param {Arranged} at @param {Float64Array} heights @param {Theme} theme @param {number[]} dashes */
function drawLine(pen, at, heights, theme, dashes) {
  path(pen, []);
  follow(pen, at, heights);
  pen.globalAlpha = 0.7;
  stroke(pen, theme.paper, 3.4);
  pen.globalAlpha = 1;
  stroke(pen, dashes.length ? theme.quiet : theme.ink, 1.3, dashes);
}

/** Names areas where there is room; the others are returned. @param {Pen} pen @param {Arranged} at @param {Memory} memory */
function drawLabels(pen, at, memory) {
  const nothing = new Float64Array(at.columns);
  const bytesPerPixel = at.scale.top / (at.bottom - at.top);
  const { density } = at.size;
  return at.scene.groups.filter(({ name, label, colour }, number) => {
    const wide = pen.measureText(label).width + 8;
    const area = [at.tops[number - 1] ?? nothing, at.tops[number]];
    const needed = [(wide + 8) * density, (FONT_SIZE + 3) * bytesPerPixel];
    const was = memory.places.get(name);
    const place = layout.labelPlace(area, needed, was === undefined ? null : was * at.columns);
    memory.places.delete(name);
    if (!place) return true;
    memory.places.set(name, place.column / at.columns);
    const [x, y] = [at.left + place.column / density, at.yOf(place.bytes)];
    fillBox(pen, colour, [x - wide / 2, y - FONT_SIZE / 2 - 1, wide, FONT_SIZE + 2]); // over a pattern
    write(pen, label, x, y + 0.5, inkOn(colour), "center");
    return false;
  });
}

/** Above the picture: lines, and areas that are too small to be named inside. @param {Pen} pen @param {Arranged} at @param {Group[]} unnamed @param {Theme} theme */
function drawKey(pen, at, unnamed, theme) {
  const { before, measured, timeline } = at.scene;
  /** @param {string} name @param {Timeline} line @param {Timeline} reference */
  const named = (name, line, reference) =>
    `${name} ${formatBytes(geometryOf(line, reference).peakBytes)}`;
  const areas = unnamed.filter(({ held }) => held.some(Boolean)).reverse();
  /** @type {{text: string, group?: Group, dashes?: number[]}[]} */
  const items = areas.map((group) => ({ text: group.label, group }));
  if (before) items.unshift({ text: named("before", before, before), dashes: DASHES });
  if (measured) items.unshift({ text: named("measured", measured, timeline), dashes: [] });

  let [x, y] = [at.left, ROW / 2 + 2];
  items.forEach(({ text, group, dashes }, number) => {
    const wide = pen.measureText(text).width + 32;
    const isLastRow = y > (at.keyRows - 1) * ROW;
    const rest = isLastRow && number < items.length - 1 ? 50 : 0; // room to say how many are left
    if (x + wide + rest > at.right + 14 && x > at.left) {
      if (isLastRow && y < Infinity)
        write(pen, `+${items.length - number} more`, x, y, theme.quiet);
      [x, y] = isLastRow ? [at.left, Infinity] : [at.left, y + ROW];
    }
    if (y === Infinity) return;
    path(
      pen,
      dashes
        ? [
            [x, y],
            [x + 13, y],
          ]
        : [],
    );
    if (dashes) stroke(pen, dashes.length ? theme.quiet : theme.ink, 1.3, dashes);
    pen.rect(x + 1, y - 5.5, 11, 11);
    if (group) fillAs(pen, group);
    write(pen, text, x + 18, y, theme.quiet);
    x += wide;
  });
}

/** @param {Pen} pen @param {Arranged} at @param {Theme} theme */
function drawLimit(pen, at, theme) {
  const { limitBytes: limit, limitOf } = at.scene;
  if (limit === null) return;
  const text = `limit ${formatBytes(limit)}${limitOf ? ` on ${limitOf}` : ""}`;
  if (!at.isLimitShown) {
    const half = (at.right - at.left) / 2;
    const whole = `${text}, above this picture`;
    const shown = pen.measureText(whole).width < half ? whole : `${text} ↑`;
    const isLeft = at.xOf(at.x[at.peak]) > at.left + half; // away from the peak
    const x = isLeft ? at.left + 4 : at.right;
    return write(pen, shown, x, at.top + 9, theme.bad, isLeft ? "left" : "right");
  }
  const y = at.yOf(limit) + 0.5;
  path(pen, [
    [at.left, y],
    [at.right, y],
  ]);
  stroke(pen, theme.bad, 1.4, [6, 4]);
  const wide = pen.measureText(text).width + 8;
  const count = Math.round(wide * at.size.density);
  const isRight = highest(at.total.subarray(-count)) <= highest(at.total.subarray(0, count));
  const x = isRight ? at.right - wide : at.left; // where less is live
  fillBox(pen, theme.paper, [x, y - 17, wide, 15], 0.85);
  write(pen, text, x + 4, y - 9, theme.bad);
}

/** Phases and micro-batches, or the stages of a run, under the axis. @param {Pen} pen @param {Arranged} at @param {Theme} theme */
function drawBands(pen, at, theme) {
  const { phase, microBatch, stages } = at.scene.timeline;
  const { view, bottom, axis } = at;
  const wide = at.right - at.left;
  /** @param {{from: number, to: number}} band @param {string[]} names ever shorter @param {number} below @param {string} colour */
  const name = (band, names, below, colour) => {
    const [from, to] = [at.xOf(band.from), at.xOf(band.to)];
    const fitting = names.find((each) => pen.measureText(each).width + 6 < to - from);
    if (fitting)
      write(pen, fitting, (from + to) / 2, bottom + below + ROW / 2 + 0.5, colour, "center");
  };
  for (const band of layout.bandsOf(at.x, stages?.of ?? phase, view, 4 / wide)) {
    const [from, to] = [at.xOf(band.from), at.xOf(band.to)];
    fillBox(
      pen,
      theme.ink,
      [from, bottom + 4, Math.max(to - from - 1, 0.5), ROW],
      stages ? STAGE_TONES[band.last % 2] : PHASE_TONES[band.last],
    );
    const isOne = stages || band.first === band.last;
    const first = isOne ? band.first : Math.max(band.first, FORWARD);
    const phases = (stages?.names ?? PHASES).slice(first, band.last + 1).join(" and ");
    name(band, [phases, SHORT[phases] ?? ""], 4, theme.ink);
  }

  const y = ROW + 6;
  if (!microBatch.some(Boolean)) {
    return name(
      { from: view[0], to: view[1] },
      ["operators in the order in which they run"],
      y,
      theme.quiet,
    );
  }
  const inBatches = /** @type {Range} */ ([view[0], Math.min(view[1], axis.tail)]);
  const batches = layout.bandsOf(at.x, microBatch, inBatches, 22 / wide);
  const isWide = batches.every(({ from, to }) => at.xOf(to) - at.xOf(from) > 90);
  for (const band of batches) {
    const [first, last] = [band.first + 1, band.last + 1];
    const one = isWide || batches.length < 3 ? [`micro-batch ${first}`, `${first}`] : [`${first}`];
    name(band, first === last ? one : [`micro-batches ${first} to ${last}`], y, theme.quiet);
    if (band.from === view[0]) continue;
    fillBox(pen, theme.quiet, [Math.round(at.xOf(band.from)) - 1, bottom + 4, 1, 2 * ROW], 0.5);
  }
}

/** How many pixels wide the step is at nine tenths of its peak, around it. @param {Arranged} at */
function peakWidth({ scene, peak, peakBytes, x, xOf }) {
  const { total } = scene.timeline;
  let [from, to] = [peak, peak];
  while (from > 0 && total[from - 1] >= 0.9 * peakBytes) from -= 1;
  while (to < total.length && total[to] >= 0.9 * peakBytes) to += 1;
  return xOf(to < total.length ? x[to] : 1) - xOf(x[from]);
}

/** @param {Pen} pen @param {Arranged} at @param {Theme} theme */
function drawPeak(pen, at, theme) {
  const size = `peak ${formatBytes(at.peakBytes)}`;
  const y = at.top - ROW / 2 - 4;
  const place = at.x[at.peak];
  if (place < at.view[0]) return write(pen, `‹ ${size}`, at.left, y, theme.ink);
  if (place > at.view[1]) return write(pen, `${size} ›`, at.right, y, theme.ink, "right");

  const x = layout.clamped(at.xOf(place), at.left + 0.5, at.right - 0.5);
  const top = at.yOf(at.peakBytes);
  path(pen, [
    [x, at.top - 4],
    [x, top],
  ]);
  stroke(pen, theme.ink, 1);
  const isNeedle = peakWidth(at) < NEEDLE;
  path(
    pen,
    isNeedle
      ? [
          [x, top],
          [x - 5, top - 9],
          [x + 5, top - 9],
        ]
      : [],
  );
  if (!isNeedle) pen.arc(x, top, 3, 0, 2 * Math.PI);
  fill(pen, theme.ink);

  const texts = [`${size}: ${at.scene.describe(at.peak).title}`, size];
  const text = texts.find((each) => pen.measureText(each).width < at.right - at.left) ?? size;
  write(
    pen,
    text,
    Math.max(at.left, Math.min(x - 4, at.right - pen.measureText(text).width)),
    y,
    theme.ink,
  );
}

/** Where in the step a zoomed picture is. @param {Pen} pen @param {Arranged} at @param {Theme} theme */
function drawZoom(pen, { view: [from, to], left, right }, theme) {
  if (to - from === 1) return;
  const wide = right - left;
  fillBox(pen, theme.line, [left, 0, wide, 3]);
  fillBox(pen, theme.quiet, [left + from * wide, 0, Math.max((to - from) * wide, 3), 3]);
}

/** @param {Pen} pen @param {Arranged} at @param {Theme} theme */
function drawDimmed(pen, { scene, size: { width, height } }, theme) {
  fillBox(pen, theme.paper, [0, 0, width, height], 0.78);
  const lines = [""];
  for (const word of scene.dimmed.split(" ")) {
    const longer = `${lines[lines.length - 1]} ${word}`.trim();
    if (pen.measureText(longer).width < Math.min(width - 40, 460)) lines[lines.length - 1] = longer;
    else lines.push(word);
  }
  const top = height / 2 - ((lines.length - 1) / 2) * ROW;
  const wide = Math.max(...lines.map((line) => pen.measureText(line).width)) + 24;
  fillBox(pen, theme.paper, [(width - wide) / 2, top - ROW, wide, (lines.length + 1) * ROW]);
  lines.forEach((line, number) =>
    write(pen, line, width / 2, top + number * ROW, theme.ink, "center"),
  );
}
