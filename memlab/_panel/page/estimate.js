/**
 * What a recorded step says of another batch size, number of micro-batches or memory budget: the
 * same rules as `memlab/prediction/interpolation.py`, which explains them.
 *
 * @typedef {import("./recorded_step.js").RecordedStep} RecordedStep
 * @typedef {import("./recorded_step.js").Timeline} Timeline
 * @typedef {import("./recorded_step.js").Trace} Trace
 * @typedef {import("./step_file.js").Plan} Plan
 *
 * @typedef {object} Setting what sliders move
 * @property {number} batchSize of all ranks together
 * @property {number} accumulationSteps
 * @property {number} memoryBudget
 *
 * @typedef {"predicted" | "interpolated" | "estimated"} How
 * @typedef {"measured" | "recorded"} Ran
 *
 * @typedef {object} Estimate
 * @property {How | Ran} how
 * @property {Setting} setting
 * @property {Timeline} timeline
 * @property {number} peakBytes allocated
 * @property {number | null} reservedBytes at the peak; null without a caching allocator
 * @property {number | null} firstStepPeakBytes null in an estimate
 * @property {number | null} seconds of a step; null if times are not known
 * @property {Record<string, number>} uncertainty relative half-widths by field
 * @property {number[] | null} sizes of the micro-batches that were computed; null in an estimate
 * @property {Trace | null} trace of these; null in an estimate
 * @property {number} firstEvent of the timeline in the trace
 * @property {string} of what it was estimated from; "" if it was not
 * @property {boolean} [isWhole] of a result: whether the step came to its peak
 * @property {number | null} [neededBytes] of a result: the least limit within which it runs
 * @property {{module: string, operator: string} | null} [peakPlace] of a result
 */

import { highest, rint } from "./numbers.js";
import { CATEGORIES, PHASES, microBatchSizes } from "./recorded_step.js";

// each as in `interpolation.py`, where its measurement is named
const INTERPOLATED = 0.03;
const HOST_FACTOR = 1.5;
const HOST_HALF_WIDTH = (HOST_FACTOR - 1 / HOST_FACTOR) / 2; // `memlab/cost_model/overlap.py`
const REGROUPED = 0.03;
const ADDITIONS = 0.3;
const REPLANNED = 0.03;
const SEGMENT_BYTES = 20 * 2 ** 20;

const [GRADIENTS, ACTIVATIONS, TEMPORARIES, INPUTS] = [
  "gradients",
  "activations",
  "temporaries",
  "inputs",
].map((name) => CATEGORIES.indexOf(name));
const OPTIMIZER = PHASES.indexOf("optimizer");

/**
 * What this step says of a setting; null if that is nothing.
 *
 * @param {RecordedStep} step
 * @param {Setting} setting
 * @returns {Estimate | null}
 */
export function estimate(step, setting) {
  const config = step.header.result.config;
  const plan = planAt(step, setting.memoryBudget);
  const own = planAt(step, config.memory_budget);
  const here = { ...setting, memoryBudget: config.memory_budget };
  const isSame = setting.memoryBudget === config.memory_budget || (plan !== null && plan === own);
  const found = ofSameBudget(step, here);
  if (!found || isSame) return found && { ...found, setting };
  if (plan === null || own === null || !step.header.estimates.budget) return null;
  return replanned(step, found, setting, own, plan);
}

/** @type {How[]} the best first */
const HOWS = ["predicted", "interpolated", "estimated"];

/**
 * What several recordings of one step say of a setting: the best of their answers.
 *
 * @param {RecordedStep[]} steps
 * @param {Setting} setting
 * @returns {{step: RecordedStep, found: Estimate} | null}
 */
export function bestEstimate(steps, setting) {
  // only the best is computed, since a slider moves at once and there may be many recordings
  const ranked = steps.map((step) => ({ step, rank: rankOf(step, setting) }));
  for (const { step } of ranked.sort((one, other) => one.rank - other.rank)) {
    const found = estimate(step, setting);
    if (found) return { step, found };
  }
  return null;
}

/** How good the answer of a recording is, if it has one; less is better. @param {RecordedStep} step @param {Setting} setting */
function rankOf(step, { batchSize, accumulationSteps, memoryBudget }) {
  const { memory_budget: budget } = step.header.result.config;
  const plan = planAt(step, memoryBudget);
  const isSame = memoryBudget === budget || (plan !== null && plan === planAt(step, budget));
  const perRank = batchSize / step.header.data_parallel_size;
  const sizes = microBatchSizes(perRank, accumulationSteps);
  /** @type {How} */
  let how = "estimated";
  if (isSame && step.covers(sizes)) how = step.isExact(sizes) ? "predicted" : "interpolated";
  return HOWS.indexOf(how) + Math.abs(budget - memoryBudget) / 2;
}

/** @param {RecordedStep} step @param {Setting} setting @returns {Estimate | null} */
function ofSameBudget(step, setting) {
  const ranks = step.header.data_parallel_size;
  const { batchSize, accumulationSteps: count } = setting;
  const perRank = batchSize / ranks;
  if (!Number.isInteger(perRank) || perRank < count) return null;
  if (ranks > 1 && perRank % count) return null;
  if (count > 1 && !step.header.estimates.accumulation && count !== step.numRecorded) return null;
  const sizes = microBatchSizes(perRank, count);
  if (step.covers(sizes)) return interpolated(step, setting, sizes);
  const recorded = Array(step.numRecorded).fill(sizes[0]);
  if (!step.header.estimates.accumulation || !step.covers(recorded)) return null;
  return regrouped(step, setting, recorded);
}

/** @param {RecordedStep} step @param {Setting} setting @param {number[]} sizes @returns {Estimate} */
function interpolated(step, setting, sizes) {
  const isExact = step.isExact(sizes);
  const widths = step.header.result.uncertainty;
  const { trace, timeline, peakBytes, reservedBytes, firstStepPeakBytes, events } =
    step.memory(sizes);
  return {
    how: isExact ? "predicted" : "interpolated",
    setting,
    timeline,
    peakBytes,
    reservedBytes,
    firstStepPeakBytes,
    seconds: step.stepSeconds(sizes) || null, // 0: timing noise, drawn out beyond the recorded
    uncertainty: isExact ? widened(widths, 0) : ofOtherBatch(step, sizes),
    sizes,
    trace,
    firstEvent: events[0],
    of: "",
  };
}

/** @param {RecordedStep} step @param {Setting} setting @param {number[]} recorded @returns {Estimate} */
function regrouped(step, setting, recorded) {
  const told = interpolated(step, setting, recorded);
  const count = setting.accumulationSteps;
  const timeline = withMicroBatches(told.timeline, count);
  const peakBytes = highest(timeline.total);
  const each = step.microBatchSeconds(recorded[0]);
  let seconds = null;
  if (told.seconds !== null && each !== null) {
    seconds = told.seconds + (count - recorded.length) * each;
  }
  const uncertainty = widened(told.uncertainty, REGROUPED);
  delete uncertainty.needed_bytes;
  delete uncertainty.watts;
  if ("step_seconds" in uncertainty && recorded.length === 1) uncertainty.step_seconds += ADDITIONS;
  const more = peakBytes - told.peakBytes;
  return {
    ...estimateOf(told, timeline, uncertainty),
    reservedBytes: told.reservedBytes === null ? null : told.reservedBytes + more,
    seconds,
    of: `a step with ${recorded.length} micro-batches`,
  };
}

/**
 * @param {RecordedStep} step
 * @param {Estimate} base with the recorded budget
 * @param {Setting} setting
 * @param {Plan} before
 * @param {Plan} after
 * @returns {Estimate}
 */
function replanned(step, base, setting, before, after) {
  const planned = /** @type {NonNullable<typeof step.header.plans>} */ (step.header.plans);
  const perRank = setting.batchSize / step.header.data_parallel_size;
  const scale = Math.ceil(perRank / setting.accumulationSteps) / planned.micro_batch_size;
  const more = rint((after.peak_bytes - before.peak_bytes) * scale);
  const most = Math.max(after.saved_bytes / Math.max(before.saved_bytes, 1), 1);
  const timeline = withPeak(base.timeline, Math.max(base.peakBytes + more, 1), most);
  const peakBytes = highest(timeline.total);
  const { reservedBytes } = base;
  const reserved = reservedBytes === null ? null : Math.max(reservedBytes + more, peakBytes);

  // the plans count the micro-batches that were recorded
  const counted = Math.min(planned.accumulation_steps, step.header.most_recorded);
  const repeats = (scale * setting.accumulationSteps) / counted;
  const [was, is] = [before.recompute_seconds, after.recompute_seconds];
  let seconds = null;
  if (base.seconds !== null && was !== null && is !== null) {
    seconds = base.seconds + (is - was) * repeats;
    if (seconds <= 0) seconds = null;
  }
  const uncertainty = widened(base.uncertainty, REPLANNED);
  if (reserved && "peak_reserved_bytes" in uncertainty) {
    uncertainty.peak_reserved_bytes += SEGMENT_BYTES / reserved;
  }
  delete uncertainty.needed_bytes;
  delete uncertainty.watts;
  return {
    ...estimateOf({ ...base, setting }, timeline, uncertainty),
    reservedBytes: reserved,
    seconds,
    of: `memory_budget=${step.header.result.config.memory_budget}`,
  };
}

/** @param {Estimate} told @param {Timeline} timeline @param {Record<string, number>} uncertainty @returns {Estimate} */
function estimateOf(told, timeline, uncertainty) {
  return {
    ...told,
    how: "estimated",
    timeline,
    peakBytes: highest(timeline.total),
    firstStepPeakBytes: null,
    uncertainty,
    sizes: null,
    trace: null,
    firstEvent: 0,
  };
}

/**
 * The plan with which a budget is run; null if the plans are not known.
 *
 * @param {RecordedStep} step
 * @param {number} budget
 */
export function planAt(step, budget) {
  const plans = step.header.plans?.plans;
  if (!plans || plans.length < 2) return null;
  if (budget >= 1) return plans[0];
  return plans.find((plan) => plan.share <= budget) ?? plans[plans.length - 1];
}

/** The widths of a batch between recorded ones, or beyond. @param {RecordedStep} step @param {number[]} sizes */
function ofOtherBatch(step, sizes) {
  const widths = { ...step.header.result.uncertainty };
  if ("step_seconds" in widths) {
    const byHost = HOST_HALF_WIDTH * step.hostShare(sizes);
    widths.step_seconds = Math.max(widths.step_seconds, byHost);
  }
  return widened(widths, INTERPOLATED);
}

/** @param {Record<string, number> | null} widths @param {number} by @returns {Record<string, number>} */
function widened(widths, by) {
  return Object.fromEntries(
    Object.entries(widths ?? {}).map(([name, width]) => [name, width + by]),
  );
}

/**
 * A timeline with another number of micro-batches of the same size.
 *
 * @param {Timeline} timeline
 * @param {number} count
 * @returns {Timeline}
 */
function withMicroBatches(timeline, count) {
  const length = timeline.total.length;
  const recorded = highest(timeline.microBatch) + 1;
  /** @type {number[][]} */
  const rows = Array.from({ length: recorded }, () => []);
  /** @type {number[]} */
  const update = [];
  for (let at = 0; at < length; at += 1) {
    (timeline.phase[at] === OPTIMIZER ? update : rows[timeline.microBatch[at]]).push(at);
  }
  // the first and the last are those of the recording, where it has both
  const middle = recorded > 1 ? rows[1] : rows[0];
  const pieces = [rows[0]];
  for (let copy = 0; copy < count - 2; copy += 1) pieces.push(middle);
  if (count > 1) pieces.push(rows[recorded - 1]);
  pieces.push(update);

  const size = pieces.reduce((sum, piece) => sum + piece.length, 0);
  const microBatch = new Int32Array(size);
  const operator = new Int32Array(size);
  let [at, before, begin, end] = [0, 0, 0, 0]; // begin and end: of the later micro-batches
  pieces.forEach((piece, number) => {
    if (number === 1) begin = at;
    if (number === count) end = at;
    microBatch.fill(Math.min(number, count - 1), at, at + piece.length);
    const more = before - timeline.operator[piece[0]];
    for (const row of piece) {
      operator[at] = timeline.operator[row] + more;
      at += 1;
    }
    if (piece.length) before = operator[at - 1] + 1;
  });
  const later = recorded > 1 ? timeline.held : accumulating(timeline, rows[0]);
  const batch = timeline.held[INPUTS][0]; // of all micro-batches together
  const more = Math.floor((batch * count) / recorded) - batch;
  const held = timeline.held.map((own, category) => {
    const made = inPieces(own, pieces, new Float64Array(size));
    if (later[category] !== own) {
      const rest = inPieces(later[category], pieces, new Float64Array(size));
      made.set(rest.subarray(begin, end), begin);
    }
    return category === INPUTS ? made.map((bytes) => bytes + more) : made;
  });
  const phase = inPieces(timeline.phase, pieces, new Uint8Array(size));
  return { held, total: totalOf(held), phase, microBatch, operator };
}

/**
 * Values in the order of some rows. Most pieces are rows in a row, which are copied at once: this
 * runs for each frame of a moved slider.
 *
 * @template {Float64Array | Uint8Array} Values
 * @param {Values} values
 * @param {number[][]} pieces rows
 * @param {Values} made
 * @returns {Values} `made`, filled
 */
function inPieces(values, pieces, made) {
  let at = 0;
  for (const piece of pieces) {
    const first = piece[0];
    if (piece[piece.length - 1] - first + 1 === piece.length) {
      made.set(values.subarray(first, first + piece.length), at);
    } else {
      piece.forEach((row, place) => (made[at + place] = values[row]));
    }
    at += piece.length;
  }
  return made;
}

/**
 * What a micro-batch holds if the gradients are there when it begins. A gradient that is computed
 * then lives as long as the operator that computes it.
 *
 * @param {Timeline} timeline
 * @param {number[]} rows of the micro-batch
 */
function accumulating(timeline, rows) {
  const gradients = timeline.held[GRADIENTS];
  const last = gradients[rows[rows.length - 1]];
  const temporaries = Float64Array.from(timeline.held[TEMPORARIES]);
  let begin = 0; // of the operator of each row
  rows.forEach((row, at) => {
    if (timeline.operator[row] !== timeline.operator[rows[begin]]) begin = at;
    const computed = gradients[row] - gradients[rows[Math.max(begin - 1, 0)]];
    temporaries[row] += Math.max(computed, 0);
  });
  return timeline.held.map((own, category) => {
    if (category === GRADIENTS) return new Float64Array(own.length).fill(last);
    return category === TEMPORARIES ? temporaries : own;
  });
}

/**
 * A timeline whose activations are scaled by one factor of at most `most`, so that it has this
 * peak; higher if something else holds more.
 *
 * @param {Timeline} timeline
 * @param {number} peakBytes
 * @param {number} most
 * @returns {Timeline}
 */
function withPeak(timeline, peakBytes, most) {
  const activations = timeline.held[ACTIVATIONS];
  let factor = Infinity;
  for (let at = 0; at < activations.length; at += 1) {
    if (activations[at] > 0) {
      const others = timeline.total[at] - activations[at];
      factor = Math.min(factor, (peakBytes - others) / activations[at]);
    }
  }
  if (factor === Infinity) return timeline;
  factor = Math.min(Math.max(factor, 0), most);
  const held = [...timeline.held];
  const scaled = new Float64Array(activations.length);
  for (let at = 0; at < scaled.length; at += 1) scaled[at] = rint(activations[at] * factor);
  held[ACTIVATIONS] = scaled;
  return { ...timeline, held, total: totalOf(held) };
}

/** @param {Float64Array[]} held */
export function totalOf(held) {
  const total = new Float64Array(held[0].length);
  for (const values of held) for (let at = 0; at < total.length; at += 1) total[at] += values[at];
  return total;
}
