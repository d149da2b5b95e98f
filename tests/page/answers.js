/**
 * Answers on stdout what the page computes of a step file, for a list of settings on stdin; of the
 * file of a result what that holds.
 *
 * @typedef {import("../../memlab/_panel/page/estimate.js").Setting} Setting
 * @typedef {import("../../memlab/_panel/page/recorded_step.js").Timeline} Timeline
 */
import { readFile } from "node:fs/promises";
import { createHash } from "node:crypto";
import { estimate } from "../../memlab/_panel/page/estimate.js";
import { heldBy } from "../../memlab/_panel/page/measured.js";
import { RecordedStep } from "../../memlab/_panel/page/recorded_step.js";
import { readStepFile } from "../../memlab/_panel/page/step_file.js";

const file = await readStepFile(await readFile(process.argv[2]));
const step = file.header.format === "memlab step" ? new RecordedStep(file) : null;
/** @type {(Setting & {limit: number})[]} */
const settings = JSON.parse(await readFile("/dev/stdin", "utf8"));

/** @param {Timeline} timeline */
function digest(timeline) {
  const hash = createHash("sha256");
  const { held, phase, microBatch, operator } = timeline;
  for (const values of [...held, phase, microBatch, operator]) {
    hash.update(new Uint8Array(values.buffer, values.byteOffset, values.byteLength));
  }
  return hash.digest("hex");
}

const answers = settings.map(({ limit, ...setting }) => {
  const found = step ? estimate(step, setting) : heldBy(file);
  if (!found) return null;
  return {
    how: found.how,
    peak: found.peakBytes,
    reserved: found.reservedBytes,
    first: found.firstStepPeakBytes,
    seconds: found.seconds,
    uncertainty: found.uncertainty,
    instants: found.timeline.total.length,
    timeline: digest(found.timeline),
    runs: found.sizes && step?.runsWithin(found.sizes, limit),
  };
});
console.log(JSON.stringify(answers));
