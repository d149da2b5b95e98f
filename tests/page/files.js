/** Files as `memlab/prediction/step_file.py` writes them, for the tests. */
import { gzipSync } from "node:zlib";
import { CATEGORIES } from "../../memlab/_panel/page/recorded_step.js";

/** @typedef {Record<string, Float64Array | Uint8Array | Int32Array>} Arrays */

/**
 * A file of this header and these arrays.
 *
 * @param {object} header may have a wrong list of the arrays
 * @param {Arrays} arrays
 * @param {number} [cut] bytes left out at the end, before it is compressed
 */
export function fileOf(header, arrays, cut = 0) {
  const list = Object.entries(arrays).map(([name, values]) => [
    name,
    values.constructor.name.replace("Array", "").toLowerCase(),
    values.length,
  ]);
  const text = Buffer.from(JSON.stringify({ arrays: list, ...header }));
  const length = Buffer.alloc(4);
  length.writeUInt32LE(text.length);
  const parts = [Buffer.concat([length, text]), ...Object.values(arrays)].map((part) => {
    const bytes = new Uint8Array(part.buffer, part.byteOffset, part.byteLength);
    return Buffer.concat([bytes, Buffer.alloc((8 - (bytes.length % 8)) % 8)]);
  });
  const data = Buffer.concat(parts);
  return gzipSync(data.subarray(0, data.length - cut));
}

/**
 * The file of one result, in forward.
 *
 * @param {Record<string, number[]>} changes of bytes by category, all of one length
 * @param {Record<string, any>} [told] what differs from a usual result
 */
export function resultFile(changes, told = {}) {
  const count = Object.values(changes)[0]?.length ?? 0;
  const result = {
    ...{ source: "measured", outcome: "ok", peak_allocated_bytes: null, peak_reserved_bytes: null },
    ...{ memory_limit_bytes: null, needed_bytes: null, uncertainty: null, step_seconds: null },
    ...{ first_step_peak_bytes: null, peak_place: null },
    config: { batch_size: 8, accumulation_steps: 1, memory_budget: 1 },
    ...told,
  };
  const held = CATEGORIES.map((name) => [
    name,
    Float64Array.from(changes[name] ?? Array(count).fill(0)),
  ]);
  /** @type {Arrays} */
  const arrays = {
    ...Object.fromEntries(held),
    phase: new Uint8Array(count).fill(2),
    micro_batch: new Int32Array(count),
    operator: Int32Array.from({ length: count }, (_, at) => at),
  };
  return fileOf({ format: "memlab result", version: 1, result }, count ? arrays : {});
}
