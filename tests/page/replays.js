/** Answers on stdout what the page's allocator holds, for a list of runs on stdin. */
import { readFile } from "node:fs/promises";
import { replay } from "../../memlab/_panel/page/allocator.js";

/** @type {Parameters<typeof replay>[0][]} */
const runs = JSON.parse(await readFile("/dev/stdin", "utf8"));
const answers = runs.map((run) => {
  const { reserved, allocated, failed } = replay(run);
  const judged = replay({ ...run, judgeOnly: true }).failed;
  return { reserved: [...reserved], allocated: [...allocated], failed, judged };
});
console.log(JSON.stringify(answers));
