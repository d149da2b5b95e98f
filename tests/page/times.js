/**
 * Prints how many milliseconds `estimate` takes for each setting of a list on stdin; null where
 * nothing is known of it.
 *
 * @typedef {import("../../memlab/_panel/page/estimate.js").Setting} Setting
 */
import { readFile } from "node:fs/promises";
import { performance } from "node:perf_hooks";
import { estimate } from "../../memlab/_panel/page/estimate.js";
import { RecordedStep } from "../../memlab/_panel/page/recorded_step.js";
import { readStepFile } from "../../memlab/_panel/page/step_file.js";

const bytes = await readFile(process.argv[2]);
const begin = performance.now();
const step = new RecordedStep(await readStepFile(bytes));
const read = performance.now() - begin;

/** @type {Setting[]} */
const settings = JSON.parse(await readFile("/dev/stdin", "utf8"));
const moves = settings.map((setting) => {
  const start = performance.now();
  const found = estimate(step, setting);
  const taken = performance.now() - start;
  return found && { ms: taken, how: found.how, instants: found.timeline.total.length };
});
console.log(JSON.stringify({ read, moves }));
