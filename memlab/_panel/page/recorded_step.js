/**
 * A recorded step as arithmetic: its memory and time for other batch sizes and numbers of
 * micro-batches. The same sums as `BatchSizeModel` and `Program` in Python, which explain them; a
 * test holds both to the same bytes.
 *
 * @typedef {import("./step_file.js").StepFile} StepFile
 *
 * @typedef {object} Timeline live bytes after each allocation and free of a step
 * @property {Float64Array[]} held by category, each (instants,)
 * @property {Float64Array} total (instants,)
 * @property {Uint8Array} phase index into PHASES, (instants,)
 * @property {Int32Array} microBatch (instants,)
 * @property {Int32Array | Float64Array} operator how many operators the step has run so far,
 *     (instants,); with fractions in a measured line that is drawn over a prediction
 * @property {{of: number[], names: string[]}} [stages] of a whole run, in place of phases: `of` says
 *     which stage each instant belongs to, (instants,)
 *
 * @typedef {object} Trace every allocation and free of a run
 * @property {Int32Array} block
 * @property {Float64Array} bytes negative for a free
 * @property {Int32Array} row of the file, which knows category, module and stream
 * @property {Int32Array} part which interval of the run
 * @property {Int32Array} operator how many operators the run has run so far
 * @property {Part[]} parts
 *
 * @typedef {object} Part an interval of a run, and the recorded one that it repeats
 * @property {number} recorded
 * @property {number} copy
 * @property {number} step
 * @property {number} phase
 * @property {number} microBatch
 */

import { replay } from "./allocator.js";
import { highest, rint } from "./numbers.js";

export const CATEGORIES = [
  "parameters",
  "buffers",
  "gradients",
  "optimizer_state",
  "activations",
  "temporaries",
  "inputs",
];
export const PHASES = ["build", "data", "forward", "backward", "optimizer", "teardown"];
const OPTIMIZER = PHASES.indexOf("optimizer");
const STEP = 1; // the recorded step that begins with optimizer state
const OF_HOST = 4; // where the line of the host is among those of an interval

/** Samples in each micro-batch; they differ by at most one. @param {number} batch @param {number} steps */
export function microBatchSizes(batch, steps) {
  const size = Math.floor(batch / steps);
  return Array.from({ length: steps }, (_, at) => size + (at < batch % steps ? 1 : 0));
}

export class RecordedStep {
  /** @param {StepFile} file */
  constructor(file) {
    const { header, arrays } = file;
    this.header = header;
    this.arrays = arrays;
    this.size = header.sizes[0];
    this.otherSize = header.other_size;
    this.numRecorded = header.sizes.length;
    this.intervals = header.intervals.map(([step, phase, microBatch]) => ({
      step,
      phase: PHASES.indexOf(phase),
      microBatch,
    }));
    this.isMiddle = this.intervals.map(
      ({ step, phase, microBatch }) => step >= 0 && microBatch === 1 && phase !== OPTIMIZER,
    );
    this.rowStarts = starts(arrays.row_interval, this.intervals.length);
    this.numBlocks = arrays.block_bytes.length;
  }

  /** Whether memory of these micro-batches follows from this recording. @param {number[]} sizes */
  covers(sizes) {
    const { header, size, otherSize } = this;
    if (String(sizes) === String(header.sizes)) return true;
    if (new Set(header.sizes).size > 1) return false;
    const repeats = this.numRecorded === header.most_recorded && sizes.length > this.numRecorded;
    if ((!repeats && sizes.length !== this.numRecorded) || header.differs) return false;
    const recorded = new Set([size, otherSize]);
    const isRecorded = sizes.every((wanted) => recorded.has(wanted));
    return isRecorded || (recorded.size === 2 && !recorded.has(1) && !sizes.includes(1));
  }

  /** Whether it is a recorded step itself, not interpolated. @param {number[]} sizes */
  isExact(sizes) {
    return sizes.every((size) => this.header.sizes.includes(size));
  }

  /** The intervals of a run with so many micro-batches. @param {number} count @returns {Part[]} */
  parts(count) {
    const { intervals, isMiddle } = this;
    const extra = count - this.numRecorded;
    /** @type {Part[]} */
    const parts = [];
    for (let at = 0; at < intervals.length;) {
      let end = at + 1;
      if (extra && isMiddle[at]) while (isMiddle[end]) end += 1;
      const copies = end > at + 1 ? extra + 1 : 1;
      for (let copy = 0; copy < copies; copy += 1) {
        for (let recorded = at; recorded < end; recorded += 1) {
          const { step, phase, microBatch } = intervals[recorded];
          let shift = isMiddle[recorded] ? copy : 0;
          if (!isMiddle[recorded] && microBatch === 2) shift = extra;
          parts.push({ recorded, copy, step, phase, microBatch: microBatch + shift });
        }
      }
      at = end;
    }
    return parts;
  }

  /**
   * @param {number[]} sizes samples in each micro-batch
   * @param {boolean} [least] without what kernels take only where there is room
   * @returns {Trace}
   */
  trace(sizes, least = false) {
    const { arrays, numBlocks, isMiddle, rowStarts } = this;
    const { row_block: rowBlock, block_interval: birth, block_successor: successor } = arrays;
    const own = least ? arrays.block_least_bytes : arrays.block_bytes;
    const other = least ? arrays.block_least_other_bytes : arrays.block_other_bytes;
    const parts = this.parts(sizes.length);
    const extra = Math.max(...parts.map((part) => part.copy));
    const most = parts.reduce(
      (sum, p) => sum + rowStarts[p.recorded + 1] - rowStarts[p.recorded],
      0,
    );
    const made = new Float64Array(numBlocks * (extra + 1));
    const trace = {
      block: new Int32Array(most),
      bytes: new Float64Array(most),
      row: new Int32Array(most),
      part: new Int32Array(most),
      operator: new Int32Array(most),
    };

    let count = 0;
    let ran = 0; // operators before this part
    parts.forEach((part, index) => {
      const share = this.share(part, sizes);
      const operatorsFrom = part.recorded ? this.header.operator_ends[part.recorded - 1] : 0;
      const inMiddle = isMiddle[part.recorded];
      for (let row = rowStarts[part.recorded]; row < rowStarts[part.recorded + 1]; row += 1) {
        const isBirth = rowBlock[row] >= 0;
        const block = isBirth ? rowBlock[row] : ~rowBlock[row];
        let number = block;
        if (extra) {
          if (isMiddle[birth[block]]) number += numBlocks * (inMiddle ? part.copy : extra);
          else if (inMiddle && !isBirth && part.copy > 0) {
            // it frees a block of the micro-batch before, which here is the copy before
            if (successor[block] < 0) continue;
            number = successor[block] + numBlocks * (part.copy - 1);
          }
        }
        if (isBirth) {
          const slope = other[block] - own[block];
          made[number] = Math.max(
            0,
            share === null ? own[block] : rint(own[block] + slope * share),
          );
        }
        if (!made[number]) continue;
        trace.block[count] = number;
        trace.bytes[count] = isBirth ? made[number] : -made[number];
        trace.row[count] = row;
        trace.part[count] = index;
        trace.operator[count] = arrays.row_operator[row] - operatorsFrom + ran;
        count += 1;
      }
      ran += this.header.operator_ends[part.recorded] - operatorsFrom;
    });
    const cut = Object.fromEntries(
      Object.entries(trace).map(([name, values]) => [name, values.subarray(0, count)]),
    );
    return { .../** @type {typeof trace} */ (cut), parts };
  }

  /** How far from `size` to `otherSize`; null if there is one size. @param {Part} part @param {number[]} sizes */
  share(part, sizes) {
    if (this.size === this.otherSize) return null;
    let samples = sizes[part.microBatch];
    if (part.step < 0) {
      // a whole batch has the samples of all micro-batches, of which only some were recorded
      const mean = sizes.reduce((sum, size) => sum + size, 0) / sizes.length;
      samples = mean * (sizes.length / this.numRecorded);
    }
    return (samples - this.size) / (this.otherSize - this.size);
  }

  /**
   * The memory of a step with these micro-batches, which `covers` must allow.
   *
   * @param {number[]} sizes
   * @returns {{trace: Trace, timeline: Timeline, peakBytes: number, reservedBytes: number | null,
   *     firstStepPeakBytes: number, events: [number, number]}} the trace has the bytes that the
   *     caching allocator gives out; the first of `events`, those of the timeline, is what existed
   *     before
   */
  memory(sizes) {
    const trace = this.trace(sizes);
    const steps = trace.parts.map((part) => part.step);
    const [first, begin] = [0, STEP].map((step) => trace.part.findIndex((p) => steps[p] === step));
    let end = trace.part.length;
    while (steps[trace.part[end - 1]] !== STEP) end -= 1;

    let bytes = trace.bytes;
    let reservedBytes = null;
    if (this.header.allocator) {
      const held = this.replay(trace, [first, begin], null);
      bytes = held.allocated.map((now, event) => now - (event ? held.allocated[event - 1] : 0));
      reservedBytes = highest(held.reserved.subarray(begin, end));
    }
    const timeline = this.timeline({ ...trace, bytes }, begin - 1, end);
    return {
      trace: { ...trace, bytes },
      timeline,
      peakBytes: highest(timeline.total),
      reservedBytes,
      firstStepPeakBytes: peakOf(bytes, first - 1, steps.length ? lastOf(trace, steps, 0) : 0),
      events: [begin - 1, end],
    };
  }

  /**
   * Whether the caching allocator serves the whole run within a limit; false where there is none.
   *
   * @param {number[]} sizes
   * @param {number} limitBytes
   */
  runsWithin(sizes, limitBytes) {
    if (!this.header.allocator || limitBytes < 1) return false;
    const trace = this.trace(sizes, true);
    if (peakOf(trace.bytes, 0, trace.bytes.length) > limitBytes) return false;
    const steps = trace.parts.map((part) => part.step);
    const flush = [0, STEP].map((step) => trace.part.findIndex((p) => steps[p] === step));
    return !this.replay(trace, flush, limitBytes, true).failed;
  }

  /**
   * @param {Trace} trace
   * @param {number[]} flushBefore
   * @param {number | null} limitBytes
   * @param {boolean} [judgeOnly]
   */
  replay(trace, flushBefore, limitBytes, judgeOnly = false) {
    const streams = this.arrays.row_stream;
    return replay({
      block: trace.block,
      bytes: trace.bytes,
      stream: streams ? trace.row.map((row) => streams[row]) : null,
      flushBefore,
      expandable: Boolean(this.header.allocator?.expandable_segments),
      limitBytes,
      judgeOnly,
    });
  }

  /** @param {Trace} trace @param {number} first event @param {number} end @returns {Timeline} */
  timeline(trace, first, end) {
    const category = this.arrays.row_category;
    const count = end - first;
    const held = CATEGORIES.map(() => new Float64Array(count));
    const now = new Float64Array(CATEGORIES.length);
    const total = new Float64Array(count);
    const phase = new Uint8Array(count);
    const microBatch = new Int32Array(count);
    const operator = new Int32Array(count);
    for (let event = 0; event < end; event += 1) {
      now[category[trace.row[event]]] += trace.bytes[event];
      const at = event - first;
      if (at < 0) continue;
      for (let c = 0; c < held.length; c += 1) {
        held[c][at] = now[c];
        total[at] += now[c];
      }
      const part = trace.parts[trace.part[Math.max(event, first + 1)]];
      phase[at] = part.phase;
      microBatch[at] = part.microBatch;
      operator[at] = trace.operator[event] - trace.operator[first];
    }
    return { held, total, phase, microBatch, operator };
  }

  /** The time of a step; null if times are not known. @param {number[]} sizes */
  stepSeconds(sizes) {
    return this.seconds(this.parts(sizes.length), (part) => sizes[part.microBatch]);
  }

  /** The time of one more micro-batch; null if times are not known. @param {number} size */
  microBatchSeconds(size) {
    const second = Math.min(1, this.numRecorded - 1); // the first one, if only one was recorded
    const parts = this.parts(this.numRecorded).filter(
      (part) => part.microBatch === second && part.phase !== OPTIMIZER,
    );
    return this.seconds(parts, () => size);
  }

  /** In what share of a step's time, 0..1, a card's host decides it. @param {number[]} sizes */
  hostShare(sizes) {
    const whole = this.stepSeconds(sizes);
    const known = this.header.interval_seconds;
    if (!whole || !known) return 0;
    let byHost = 0;
    for (const part of this.parts(sizes.length)) {
      if (part.step !== STEP) continue;
      const taken = longest(known[part.recorded], sizes[part.microBatch] - this.size);
      if (taken <= known[part.recorded][OF_HOST]) byHost += taken;
    }
    return byHost / whole;
  }

  /** @param {Part[]} parts @param {(part: Part) => number} sizeOf */
  seconds(parts, sizeOf) {
    const known = this.header.interval_seconds;
    if (!known) return null;
    return parts
      .filter((part) => part.step === STEP)
      .reduce((sum, part) => sum + longest(known[part.recorded], sizeOf(part) - this.size), 0);
  }
}

/** The longest of the times of an interval with so many further samples. @param {number[]} lines @param {number} further */
function longest(lines, further) {
  let found = 0;
  for (let at = 0; at < lines.length; at += 2) {
    const [own, more] = [lines[at], lines[at + 1]];
    found = Math.max(found, more ? own + more * further : own);
  }
  return found;
}

/** Where each value of an ascending array begins. @param {ArrayLike<number>} values @param {number} count */
function starts(values, count) {
  const found = new Int32Array(count + 1).fill(values.length);
  for (let at = values.length - 1; at >= 0; at -= 1) found[values[at]] = at;
  for (let value = count - 1; value >= 0; value -= 1) {
    found[value] = Math.min(found[value], found[value + 1]);
  }
  return found;
}

/** The event after the last one of a step. @param {Trace} trace @param {number[]} steps @param {number} step */
function lastOf(trace, steps, step) {
  let end = trace.part.length;
  while (end > 0 && steps[trace.part[end - 1]] !== step) end -= 1;
  return end;
}

/** The most bytes that are live from one event to another. @param {Float64Array} bytes @param {number} first @param {number} end */
function peakOf(bytes, first, end) {
  let live = 0;
  let peak = 0;
  for (let event = 0; event < end; event += 1) {
    live += bytes[event];
    if (event >= first) peak = Math.max(peak, live);
  }
  return peak;
}
