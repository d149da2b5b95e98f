/**
 * Reads the files that `memlab/prediction/step_file.py` writes, which describes their form. That of
 * a result has `result` alone and, as arrays, its timeline.
 *
 * @typedef {object} Plan
 * @property {number} share
 * @property {number} saved_bytes
 * @property {number} peak_bytes
 * @property {number | null} recompute_seconds
 * @property {string} note
 *
 * @typedef {object} Header
 * @property {string} format
 * @property {number} version
 * @property {Record<string, any>} result a `StepResult` as JSON, without timeline
 * @property {number} data_parallel_size
 * @property {number[]} sizes samples in each recorded micro-batch
 * @property {number} other_size samples in each of the other recorded step
 * @property {{accumulation: boolean, budget: boolean}} estimates which of these may be estimated
 * @property {string} differs where the two recorded steps differ; "" if they are alike
 * @property {number} most_recorded micro-batches of a step, at most
 * @property {[number, string, number][]} intervals step, phase and micro-batch
 * @property {number[]} operator_ends of each interval
 * @property {number[][] | null} interval_seconds as recorded and of a further sample, then the same
 *   of its kernels alone and of the host: the longest counts
 * @property {string[]} modules paths
 * @property {string[]} operators names
 * @property {Record<string, string>} parameters path by block
 * @property {Record<string, string>} states path by block
 * @property {{expandable_segments: boolean} | null} allocator
 * @property {{micro_batch_size: number, accumulation_steps: number, plans: Plan[]} | null} plans
 * @property {[string, "int32" | "uint8" | "float64", number][]} arrays name, type and length
 *
 * @typedef {{header: Header, arrays: Record<string, Int32Array | Uint8Array | Float64Array>}} StepFile
 */

const FORMATS = ["memlab step", "memlab result"];
const VERSION = 1;
const ALIGNMENT = 8;
const KINDS = { int32: Int32Array, uint8: Uint8Array, float64: Float64Array };

/** An error whose message is for a person. */
export class StepFileError extends Error {}

/**
 * @param {Uint8Array} bytes of the file
 * @returns {Promise<StepFile>}
 * @throws {StepFileError} it is no such file, damaged, or of a newer version
 */
export async function readStepFile(bytes) {
  try {
    const data = await unzip(bytes);
    const { header, end } = readHeader(data);
    return { header, arrays: readArrays(data, header.arrays, end) };
  } catch (error) {
    if (error instanceof StepFileError) throw error;
    throw new StepFileError("this is not a step that memlab recorded, or the file is damaged");
  }
}

/** @param {Uint8Array} bytes @returns {Promise<ArrayBuffer>} */
async function unzip(bytes) {
  const stream = new Blob([/** @type {BlobPart} */ (bytes)]).stream();
  return new Response(stream.pipeThrough(new DecompressionStream("gzip"))).arrayBuffer();
}

/** @param {ArrayBuffer} data @returns {{header: Header, end: number}} */
function readHeader(data) {
  const end = 4 + new DataView(data).getUint32(0, true);
  const header = JSON.parse(new TextDecoder().decode(new Uint8Array(data, 4, end - 4)));
  const { format, version } = header;
  if (!FORMATS.includes(format)) throw new StepFileError("this is not a step that memlab recorded");
  if (version > VERSION) {
    throw new StepFileError(
      `this step was recorded by a newer memlab (form ${version}; this one reads ${VERSION}): ` +
        "update memlab to see it",
    );
  }
  return { header, end };
}

/** @param {ArrayBuffer} data @param {Header["arrays"]} list @param {number} end of the header */
function readArrays(data, list, end) {
  /** @type {StepFile["arrays"]} */
  const arrays = {};
  let at = aligned(end);
  for (const [name, kind, count] of list) {
    const Kind = KINDS[kind];
    arrays[name] = new Kind(data, at, count);
    at = aligned(at + count * Kind.BYTES_PER_ELEMENT);
  }
  return arrays;
}

/** @param {number} at */
const aligned = (at) => Math.ceil(at / ALIGNMENT) * ALIGNMENT;
