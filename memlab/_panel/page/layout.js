/**
 * Where everything in a timeline's picture lies. Nothing here touches the page.
 *
 * An instant lies in the step, 0..1, by the operators that ran before it, as in
 * `memlab/figures/timeline.py`: seconds are not known for each instant, and an optimizer's loop over
 * parameters is long and flat, so that its phase takes a fifth of the width at most.
 *
 * @typedef {import("./recorded_step.js").Timeline} Timeline
 *
 * @typedef {object} Axis
 * @property {number} span operators of the step
 * @property {number} begin of the optimizer phase, as a share of the operators; 1: there is none
 * @property {number} tail where that lies in the picture, 0..1
 *
 * @typedef {[number, number]} Range of the step, within 0..1
 *
 * @typedef {object} Band
 * @property {number} from 0..1 of the step
 * @property {number} to
 * @property {number} first what it holds: numbers of a phase or of micro-batches
 * @property {number} last
 *
 * @typedef {object} Scale
 * @property {number} top bytes at the upper edge
 * @property {{bytes: number, text: string}[]} ticks
 *
 * @typedef {object} Place of a label's centre
 * @property {number} column
 * @property {number} bytes
 */

import { PHASES } from "./recorded_step.js";
import { SIZES } from "./words.js";

const OPTIMIZER = PHASES.indexOf("optimizer");
const OPTIMIZER_SHARE = 0.2;
/** @param {Timeline} timeline @returns {Axis} */
export function axisOf({ operator, phase }) {
  const count = operator.length;
  const span = count ? operator[count - 1] - operator[0] + 1 : 1;
  let last = count; // in backward there may be updates before it
  while (last > 0 && phase[last - 1] === OPTIMIZER) last -= 1;
  let begin = 1;
  if (last < count) {
    const same = [operator.indexOf(operator[last]), operator.lastIndexOf(operator[last]) + 1];
    begin = (operator[last] - operator[0] + (last - same[0]) / (same[1] - same[0])) / span;
  }
  return { span, begin, tail: begin > 0 ? Math.max(begin, 1 - OPTIMIZER_SHARE) : begin };
}

/**
 * Where each instant lies, ascending. With another timeline's axis, an operator lies where that
 * one has the operator of the same number: a measured step is so drawn over its prediction.
 *
 * @param {Timeline} timeline
 * @param {Axis} [axis]
 */
export function positions(timeline, axis = axisOf(timeline)) {
  const { span, begin, tail } = axis;
  const x = rawPositions(timeline.operator, span);
  if (begin === tail) return x;
  for (let at = 0; at < x.length; at += 1) {
    x[at] = x[at] <= begin ? (x[at] / begin) * tail : 1 - ((1 - x[at]) / (1 - begin)) * (1 - tail);
  }
  return x;
}

/** By operator, and within it by order. @param {Timeline["operator"]} operator @param {number} span */
function rawPositions(operator, span) {
  const x = new Float64Array(operator.length);
  for (let start = 0, end = 0; start < x.length; start = end) {
    while (end < x.length && operator[end] === operator[start]) end += 1;
    for (let at = start; at < end; at += 1) {
      x[at] = (operator[at] - operator[0] + (at - start) / (end - start)) / span;
    }
  }
  return x;
}

/** The last instant that begins at `place` or before; 0 if none does. @param {Float64Array} x @param {number} place */
export function instantAt(x, place) {
  let low = 0;
  let high = x.length;
  while (high - low > 1) {
    const middle = (low + high) >> 1;
    if (x[middle] <= place) low = middle;
    else high = middle;
  }
  return low;
}

/**
 * The first highest instant of each column of a picture, so that no peak is lost; an empty column
 * shows what was there before it.
 *
 * @param {Float64Array} x ascending
 * @param {Float64Array} total
 * @param {Range} view
 * @param {number} count of columns
 */
export function columnsOf(x, total, [from, to], count) {
  const rows = new Int32Array(count).fill(-1);
  const before = instantAt(x, from);
  const scale = count / (to - from);
  for (let at = before; at < x.length && x[at] <= to; at += 1) {
    const column = Math.min(Math.max(Math.floor((x[at] - from) * scale), 0), count - 1);
    if (rows[column] < 0 || total[at] > total[rows[column]]) rows[column] = at;
  }
  let latest = before;
  for (let column = 0; column < count; column += 1) {
    if (rows[column] < 0) rows[column] = latest;
    // the last instant of a column goes on, not its highest
    else latest = instantAt(x, from + (column + 1) / scale);
  }
  return rows;
}

/** The heights of areas on one another. @param {{held: Float64Array}[]} groups @param {Int32Array} rows */
export function stacked(groups, rows) {
  const sum = new Float64Array(rows.length);
  return groups.map(({ held }) => {
    for (let column = 0; column < rows.length; column += 1) sum[column] += held[rows[column]];
    return sum.slice();
  });
}

/**
 * A scale with ticks at powers of two. It keeps its top while that serves, because a picture that
 * breathes while a slider moves cannot be compared with the one before.
 *
 * @param {number} highest
 * @param {number} [previousTop]
 * @param {number} [mostTicks]
 * @returns {Scale}
 */
export function scaleOf(highest, previousTop = 0, mostTicks = 5) {
  const serves = highest * 1.04 <= previousTop && previousTop <= 1.8 * highest;
  const top = serves ? previousTop : Math.max(highest, 1) * 1.12;
  const [unit, factor] = SIZES.find(([, size]) => top >= 2 * size) ?? ["B", 1];
  const step = factor * 2 ** Math.max(0, Math.ceil(Math.log2(top / factor / mostTicks)));
  const ticks = Array.from({ length: Math.floor(top / step) + 1 }, (_, at) => ({
    bytes: at * step,
    text: at ? `${(at * step) / factor} ${unit}` : "0",
  }));
  return { top, ticks };
}

/**
 * The stretches of a step in which a number stays, those too narrow to be seen merged with their
 * neighbours, within a view.
 *
 * @param {Float64Array} x
 * @param {ArrayLike<number>} numbers of each instant
 * @param {Range} view
 * @param {number} least width of a band, as a share of the view
 * @returns {Band[]}
 */
export function bandsOf(x, numbers, [from, to], least) {
  /** @type {Band[]} */
  const bands = [];
  const narrow = least * (to - from);
  /** @param {Band} band */
  const isNarrow = (band) => band.first !== band.last || band.to - band.from < narrow;
  /** @param {Band} band */
  const add = (band) => {
    const before = bands.at(-1);
    if (!before || !(isNarrow(before) && band.to - band.from < narrow)) bands.push(band);
    else {
      before.to = band.to;
      before.first = Math.min(before.first, band.first);
      before.last = Math.max(before.last, band.last);
    }
  };
  for (let start = 0, end = 0; start < x.length; start = end) {
    while (end < x.length && numbers[end] === numbers[start]) end += 1;
    const band = { from: Math.max(x[start], from), to: Math.min(end < x.length ? x[end] : 1, to) };
    if (band.to > band.from) add({ ...band, first: numbers[start], last: numbers[start] });
  }
  return bands;
}

/**
 * Where a label fits into an area: in its highest window, or where it was before if it still fits
 * there, since a label that jumps cannot be read.
 *
 * @param {Float64Array[]} area bytes of its lower and its upper edge in each column
 * @param {number[]} needed columns and bytes that the label takes
 * @param {number | null} previous column of its centre
 * @returns {Place | null}
 */
export function labelPlace([bottoms, tops], [columns, bytes], previous = null) {
  const wide = Math.ceil(columns);
  let most = bytes;
  /** @param {number} start @returns {Place | null} */
  const placeAt = (start) => {
    let [floor, ceiling] = [0, Infinity];
    for (let at = start; at < start + wide && ceiling - floor > most; at += 1) {
      floor = Math.max(floor, bottoms[at]);
      ceiling = Math.min(ceiling, tops[at]);
    }
    if (!(ceiling - floor > most)) return null;
    most = ceiling - floor;
    return { column: start + wide / 2, bytes: (floor + ceiling) / 2 };
  };

  const before = previous === null ? -1 : Math.round(previous - wide / 2);
  let best = before >= 0 && before + wide <= tops.length ? placeAt(before) : null;
  if (best) return best;
  for (let start = 0; start + wide <= tops.length; start += Math.ceil(wide / 12)) {
    best = placeAt(start) ?? best;
  }
  return best;
}

/** @param {number} value @param {number} least @param {number} most */
export const clamped = (value, least, most) => Math.min(Math.max(value, least), most);
