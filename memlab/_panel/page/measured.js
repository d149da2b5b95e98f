/**
 * Measured memory over a predicted step, aligned by event: within each phase of each micro-batch
 * the measured events are spread over the predicted ones. By time, or by number alone, the two
 * lines would drift apart.
 *
 * @typedef {import("./recorded_step.js").Timeline} Timeline
 *
 * @typedef {object} Measured what a run held
 * @property {Float64Array} total bytes allocated after each event
 * @property {Uint8Array} phase index into PHASES
 * @property {Int32Array} microBatch
 */

/** @param {{phase: Uint8Array, microBatch: Int32Array}} events @param {number} at */
const partOf = ({ phase, microBatch }, at) => phase[at] * 2 ** 20 + microBatch[at];

/** The events of each part of a step, in order. @param {{phase: Uint8Array, microBatch: Int32Array}} events */
function partsOf(events) {
  /** @type {Map<number, number[]>} */
  const parts = new Map();
  for (let at = 0; at < events.phase.length; at += 1) {
    const part = partOf(events, at);
    const rows = parts.get(part);
    if (rows) rows.push(at);
    else parts.set(part, [at]);
  }
  return parts;
}

/**
 * A measured line as a timeline whose operators are those of a prediction, with fractions.
 *
 * @param {Measured} measured
 * @param {Timeline} predicted
 * @returns {Timeline | null} null if they have other numbers of micro-batches
 */
export function alignedWith(measured, predicted) {
  const last = (/** @type {Int32Array} */ numbers) => numbers[numbers.length - 1];
  if (!measured.total.length || last(measured.microBatch) !== last(predicted.microBatch))
    return null;
  const there = partsOf(predicted);
  const place = placesOf(predicted.operator);
  const operator = new Float64Array(measured.total.length);
  for (const [part, rows] of partsOf(measured)) {
    const events = there.get(part);
    if (!events) continue; // it lies where the event before it does
    rows.forEach((row, number) => {
      const at = (number / rows.length) * events.length;
      const from = Math.min(Math.floor(at), events.length - 1);
      const begin = place[events[from]];
      const end = events[from] + 1 < place.length ? place[events[from] + 1] : begin + 1;
      operator[row] = begin + (at - from) * (end - begin);
    });
  }
  // what no prediction has stays where the step was; never backwards
  operator[0] = place[0];
  for (let at = 1; at < operator.length; at += 1) {
    operator[at] = Math.max(operator[at], operator[at - 1]);
  }
  return { ...measured, held: [], operator };
}

/**
 * The instant of another step that is like one of this step: as far into its phase, of the
 * micro-batch that is as far into the step.
 *
 * @param {Timeline} one
 * @param {Timeline} other
 * @param {number} instant of the first
 * @returns {number | null} null if the other has no such phase
 */
export function instantAlike(one, other, instant) {
  const [from, to] = [one, other].map((timeline) => partsOfPhase(timeline, one.phase[instant]));
  const at = from.findIndex((rows) => rows.includes(instant));
  const alike = to[Math.floor((at * to.length) / from.length)];
  if (!alike) return null;
  return alike[Math.floor((from[at].indexOf(instant) * alike.length) / from[at].length)];
}

/** The instants of a phase, by micro-batch. @param {Timeline} timeline @param {number} phase @returns {number[][]} */
function partsOfPhase(timeline, phase) {
  const parts = known.get(timeline) ?? partsOf(timeline);
  known.set(timeline, parts);
  return [...parts.values()].filter((rows) => timeline.phase[rows[0]] === phase);
}
/** @type {WeakMap<Timeline, ReturnType<typeof partsOf>>} */
const known = new WeakMap();

/** Where each event begins, in operators, as `layout.positions` spreads them. @param {Timeline["operator"]} operator */
function placesOf(operator) {
  const places = new Float64Array(operator.length);
  for (let start = 0, end = 0; start < places.length; start = end) {
    while (end < places.length && operator[end] === operator[start]) end += 1;
    for (let at = start; at < end; at += 1) {
      places[at] = operator[at] + (at - start) / (end - start);
    }
  }
  return places;
}

/** A measured line on an axis of its own, one event after the other. @param {Measured} measured @returns {Timeline} */
export const byEvent = (measured) => ({
  ...measured,
  held: [],
  operator: Int32Array.from(measured.total, (_, at) => at),
});
