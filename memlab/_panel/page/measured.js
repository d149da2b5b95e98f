/**
 * What a run held: as a picture of its own, and as a line over a predicted step. The line is aligned
 * by event: within each phase of each micro-batch the measured events are spread over the predicted
 * ones. By time, or by number alone, the two would drift apart.
 *
 * @typedef {import("./estimate.js").Estimate} Estimate
 * @typedef {import("./recorded_step.js").Timeline} Timeline
 * @typedef {Pick<Timeline, "total" | "phase" | "microBatch">} Measured
 */

import { totalOf } from "./estimate.js";
import { highest } from "./numbers.js";
import { CATEGORIES } from "./recorded_step.js";

/**
 * A result in place of an estimate; null if it has no peak. Its timeline may be empty.
 *
 * @param {import("./step_file.js").StepFile} file of one result
 * @returns {Estimate | null}
 */
export function heldBy({ header: { result }, arrays }) {
  const none = new Float64Array();
  const held = CATEGORIES.map((name) => summed(arrays[name] ?? none));
  const total = totalOf(held);
  const peakBytes = total.length ? highest(total) : result.peak_allocated_bytes;
  if (peakBytes === null) return null;
  const { config, outcome, peak_reserved_bytes: reservedBytes } = result;
  // a limit on a CPU does not end a step
  const isJudged = reservedBytes === null && result.memory_limit_bytes !== null;
  const isWhole = outcome === "ok" || (outcome === "out_of_memory" && isJudged);
  return {
    ...{ how: result.source, isWhole, peakBytes, reservedBytes, peakPlace: result.peak_place },
    ...{ neededBytes: result.needed_bytes, firstStepPeakBytes: result.first_step_peak_bytes },
    ...{ seconds: result.step_seconds, uncertainty: result.uncertainty ?? {} },
    ...{ sizes: null, trace: null, firstEvent: 0, of: "" },
    setting: {
      batchSize: config.batch_size,
      accumulationSteps: config.accumulation_steps,
      memoryBudget: config.memory_budget,
    },
    timeline: {
      held,
      total,
      phase: /** @type {Uint8Array} */ (arrays.phase ?? new Uint8Array()),
      microBatch: /** @type {Int32Array} */ (arrays.micro_batch ?? new Int32Array()),
      operator: /** @type {Int32Array} */ (arrays.operator ?? new Int32Array()),
    },
  };
}

/** The sums of changes so far. @param {ArrayLike<number>} changes */
function summed(changes) {
  let sum = 0;
  return Float64Array.from(changes, (change) => (sum += change));
}

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
