// Answers on stdout what the page computes of a step file, for a list of settings on stdin.
import { readFile } from "node:fs/promises";
import { createHash } from "node:crypto";
import { readStepFile } from "../../memlab/_panel/page/step_file.js";
import { RecordedStep } from "../../memlab/_panel/page/recorded_step.js";
import { estimate } from "../../memlab/_panel/page/estimate.js";

const step = new RecordedStep(await readStepFile(await readFile(process.argv[2])));
const settings = JSON.parse(await readFile("/dev/stdin", "utf8"));

const digest = (timeline) => {
  const hash = createHash("sha256");
  for (const held of timeline.held) hash.update(new Uint8Array(held.buffer, held.byteOffset, held.byteLength));
  hash.update(Uint8Array.from(timeline.phase));
  for (const values of [timeline.microBatch, timeline.operator]) {
    hash.update(new Uint8Array(values.buffer, values.byteOffset, values.byteLength));
  }
  return hash.digest("hex");
};

const answers = settings.map(({ limit, ...setting }) => {
  const found = estimate(step, setting);
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
    runs: found.sizes && limit ? step.runsWithin(found.sizes, limit) : null,
  };
});
console.log(JSON.stringify(answers));
