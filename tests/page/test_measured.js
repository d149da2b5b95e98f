/** A measured line lies over the prediction event by event; the table shows what is asked of it. */
import assert from "node:assert/strict";
import { test } from "node:test";
import { fitVerdict } from "../../memlab/_panel/page/verdict.js";
import { readStepFile } from "../../memlab/_panel/page/step_file.js";
import { resultFile } from "./files.js";
import { positions } from "../../memlab/_panel/page/layout.js";
import { alignedWith, heldBy, instantAlike } from "../../memlab/_panel/page/measured.js";
import { PHASES } from "../../memlab/_panel/page/recorded_step.js";
import { ORDERS, shownRows } from "../../memlab/_panel/page/runs_order.js";

const [FORWARD, BACKWARD, OPTIMIZER] = ["forward", "backward", "optimizer"].map((name) =>
  PHASES.indexOf(name),
);

/** @param {number[]} phase @param {number[]} microBatch @param {number[]} total */
const eventsOf = (phase, microBatch, total) => ({
  phase: Uint8Array.from(phase),
  microBatch: Int32Array.from(microBatch),
  total: Float64Array.from(total),
});

const predicted = {
  ...eventsOf(
    [FORWARD, FORWARD, BACKWARD, BACKWARD, FORWARD, BACKWARD, OPTIMIZER],
    [0, 0, 0, 0, 1, 1, 1],
    [1, 2, 3, 2, 3, 2, 1],
  ),
  held: [],
  operator: Int32Array.from([0, 0, 1, 2, 3, 4, 5]),
};

const GIB = 2 ** 30;

/** @param {Record<string, number[]>} changes @param {object} told */
const held = async (changes, told = {}) => heldBy(await readStepFile(resultFile(changes, told)));

test("a result has a picture without a recording, and its own source", async () => {
  const changes = { parameters: [5, 0, 0], activations: [0, 4, -1] };
  const found = await held(changes, { source: "recorded", step_seconds: 0.5 });
  assert.equal(found?.how, "recorded");
  assert.equal(found?.seconds, 0.5);
  assert.equal(found?.peakBytes, 9);
  assert.deepEqual([...(found?.timeline.total ?? [])], [5, 9, 8]);
  assert.deepEqual([...(found?.timeline.held[4] ?? [])], [0, 4, 3]);
  assert.equal(await held({}, {}), null, "it failed before it held anything");
  const alone = await held({}, { peak_allocated_bytes: 7 });
  assert.deepEqual([alone?.peakBytes, alone?.timeline.total.length], [7, 0]);
});

test("a result is compared with any limit, unless the step did not come to its peak", async () => {
  /** @param {object} told @param {number} limit */
  const said = async (told, limit) => {
    const found = await held({}, { peak_allocated_bytes: 3 * GIB, ...told });
    assert.ok(found);
    return fitVerdict(null, found, limit, "t4");
  };
  const fits = await said({}, 4 * GIB);
  assert.equal(fits.text, "fits: takes 3.00 GiB of 4.00 GiB, measured");
  assert.equal(fits.detail, "peak allocated bytes, measured on t4");
  assert.equal((await said({}, 2 * GIB)).kind, "bad");

  const predicted = {
    ...{ source: "predicted", peak_reserved_bytes: 5 * GIB, needed_bytes: 3 * GIB },
    uncertainty: { peak_reserved_bytes: 0.02, needed_bytes: 0.02 },
  };
  assert.match((await said(predicted, 4 * GIB)).text, /^fits with less cache: reserves 5.00 GiB/);
  assert.match((await said(predicted, 3 * GIB)).text, /^too close to say/);
  assert.match((await said(predicted, 6 * GIB)).detail, /predicted for t4 ± 2 %$/);

  const onCard = { outcome: "out_of_memory", peak_reserved_bytes: 3 * GIB };
  assert.equal(
    (await said(onCard, 4 * GIB)).text,
    "not known: the step ended at 3.00 GiB reserved",
  );
  const onCpu = { outcome: "out_of_memory", memory_limit_bytes: 2 * GIB };
  assert.equal((await said(onCpu, 4 * GIB)).kind, "good", "there it runs to its end");
});

test("with the same events each lies where the prediction has it", () => {
  const line = alignedWith(predicted, predicted);
  assert.ok(line);
  assert.deepEqual([...positions(line)], [...positions({ ...predicted, operator: line.operator })]);
  assert.deepEqual([...line.operator], [0, 0.5, 1, 2, 3, 4, 5]);
});

test("more events are spread within their phase of their micro-batch", () => {
  const measured = eventsOf(
    [FORWARD, BACKWARD, BACKWARD, BACKWARD, BACKWARD, FORWARD, BACKWARD, OPTIMIZER],
    [0, 0, 0, 0, 0, 1, 1, 1],
    [1, 2, 3, 4, 3, 2, 2, 1],
  );
  const line = alignedWith(measured, predicted);
  assert.deepEqual([...(line?.operator ?? [])], [0, 1, 1.5, 2, 2.5, 3, 4, 5]);
});

test("a phase that was not predicted stays where the step was, and nothing runs backwards", () => {
  const measured = eventsOf(
    [FORWARD, PHASES.indexOf("data"), BACKWARD, FORWARD, BACKWARD, OPTIMIZER],
    [0, 1, 0, 1, 1, 1],
    [1, 2, 3, 4, 3, 2],
  );
  const line = alignedWith(measured, predicted);
  assert.deepEqual([...(line?.operator ?? [])], [0, 0, 1, 3, 4, 5]);
});

test("a run with another number of micro-batches is no line over this picture", () => {
  const measured = eventsOf([FORWARD, BACKWARD, OPTIMIZER], [0, 0, 0], [1, 2, 1]);
  assert.equal(alignedWith(measured, predicted), null);
  assert.equal(alignedWith(eventsOf([], [], []), predicted), null);
});

test("an instant of one step lies as far into the same phase of another", () => {
  const whole = (/** @type {any} */ events) => ({
    ...events,
    held: [],
    operator: events.microBatch,
  });
  const all = [...predicted.total.keys()];
  const alike = (/** @type {any} */ one, /** @type {any} */ other) =>
    all.slice(0, one.total.length).map((at) => instantAlike(one, other, at));
  assert.deepEqual(alike(predicted, predicted), all, "of itself each is itself");
  const plain = whole(
    eventsOf(
      [FORWARD, FORWARD, FORWARD, FORWARD, BACKWARD, BACKWARD, BACKWARD],
      [0, 0, 0, 0, 0, 0, 0],
      [1, 2, 3, 4, 3, 2, 1],
    ),
  );
  // four events for two, and one micro-batch for two; an optimizer that it does not have
  assert.deepEqual(alike(predicted, plain), [0, 2, 4, 5, 0, 4, null]);
  assert.deepEqual(alike(plain, predicted), [0, 0, 1, 1, 2, 2, 3]);
  const many = whole(
    eventsOf(
      [FORWARD, BACKWARD, FORWARD, BACKWARD, FORWARD, BACKWARD, FORWARD, BACKWARD, OPTIMIZER],
      [0, 0, 1, 1, 2, 2, 3, 3, 3],
      [1, 2, 3, 4, 3, 2, 1, 1, 1],
    ),
  );
  assert.deepEqual(
    alike(predicted, many),
    [0, 0, 1, 1, 4, 5, 8],
    "the third of four for the second of two",
  );
  assert.equal(instantAlike(many, predicted, 8), 6, "one update for one");
});

const rows = [
  { number: 1, peakBytes: 300, samplesPerSecond: 10, cells: ["1", "gpt", "bf16"], name: "" },
  { number: 2, peakBytes: 100, samplesPerSecond: 30, cells: ["2", "gpt", "fp32"], name: "Best" },
  { number: 3, peakBytes: null, samplesPerSecond: null, cells: ["3", "lstm", "fp32"], name: "" },
  { number: 4, peakBytes: 100, samplesPerSecond: 20, cells: ["4", "gpt", "fp32"], name: "" },
].map((row) => /** @type {any} */ ({ ...row, isStopped: row.number === 3 }));

/** @param {object} wanted */
const numbers = (wanted) =>
  shownRows(rows, { order: ORDERS[0], words: "", withStopped: false, ...wanted }).map(
    (row) => row.number,
  );

test("runs are sorted, the newest of equal ones first, and those without a number last", () => {
  assert.deepEqual(numbers({}), [4, 2, 1]);
  assert.deepEqual(numbers({ withStopped: true }), [4, 3, 2, 1]);
  assert.deepEqual(numbers({ order: "least memory", withStopped: true }), [4, 2, 1, 3]);
  assert.deepEqual(numbers({ order: "most samples/s", withStopped: true }), [2, 4, 1, 3]);
});

test("a row is shown if all words are in it, in its cells or its name", () => {
  assert.deepEqual(numbers({ words: "GPT fp32" }), [4, 2]);
  assert.deepEqual(numbers({ words: " best " }), [2]);
  assert.deepEqual(numbers({ words: "bf16 best" }), []);
  assert.deepEqual(
    rows.map((row) => row.number),
    [1, 2, 3, 4],
    "the rows themselves stay",
  );
});
