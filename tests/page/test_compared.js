/** What makes the difference of two peaks, counted by hand, and how it is said. */
import assert from "node:assert/strict";
import { test } from "node:test";
import { differenceOf, differenceWords, settingWords } from "../../memlab/_panel/page/compared.js";
import { CATEGORIES, PHASES } from "../../memlab/_panel/page/recorded_step.js";
import { arranged } from "../../memlab/_panel/page/timeline_picture.js";

const MIB = 2 ** 20;
const FORWARD = PHASES.indexOf("forward");
const [PARAMETERS, ACTIVATIONS] = ["parameters", "activations"].map((name) =>
  CATEGORIES.indexOf(name),
);

/**
 * A step of two layers: the weights are there, then each layer's activations come.
 *
 * @param {number[]} mebibytes of the weights and of what each layer keeps
 * @param {number} seconds
 */
function stepOf([weights, first, second], seconds) {
  const bytes = [weights, first, second].map((each) => each * MIB);
  const held = CATEGORIES.map(() => new Float64Array(3));
  held[PARAMETERS].fill(bytes[0]);
  held[ACTIVATIONS].set([0, bytes[1], bytes[1] + bytes[2]]);
  const total = Float64Array.from([0, 1, 2], (at) => held[PARAMETERS][at] + held[ACTIVATIONS][at]);
  const step = {
    header: {
      modules: ["Model", "layers.0", "layers.1", "head"],
      parameters: { 0: "head.weight" },
      states: {},
    },
    arrays: { row_block: Int32Array.from([0, 1, 2]), row_module: Int32Array.from([3, 1, 2]) },
    numBlocks: 3,
  };
  const found = {
    timeline: {
      ...{ held, total, phase: Uint8Array.from([0, 0, 0], () => FORWARD) },
      ...{ microBatch: new Int32Array(3), operator: Int32Array.from([0, 1, 2]) },
    },
    trace: { block: Int32Array.from([0, 1, 2]), bytes: Float64Array.from(bytes) },
    ...{ how: "predicted", firstEvent: 0, peakBytes: total[2], seconds },
  };
  return /** @type {any} */ ({ step, found });
}

const before = stepOf([100, 300, 200], 0.2);
const after = stepOf([110, 100, 50], 0.25);

test("categories and modules add up to the difference of the peaks, the largest first", () => {
  const { bytes, categories, modules } = differenceOf(before, after, 10);
  assert.equal(bytes, -340 * MIB);
  assert.deepEqual(categories, [
    { name: "activations", bytes: -350 * MIB },
    { name: "parameters", bytes: 10 * MIB },
  ]);
  assert.deepEqual(modules, [
    { name: "layers.*", bytes: -350 * MIB },
    { name: "head", bytes: 10 * MIB },
  ]);
  const [there, back] = [differenceOf(after, before, 10), differenceOf(before, before, 10)];
  assert.equal(there.bytes, 340 * MIB);
  assert.deepEqual(back, { bytes: 0, categories: [], modules: [] });
});

test("of a step without a trace the modules are not told", () => {
  const without = { ...before, found: { ...before.found, trace: null } };
  assert.deepEqual(differenceOf(without, after, 10).modules, []);
});

/** @param {any} found @param {any} [others] */
const words = (found, others = {}) =>
  differenceWords(
    {
      name: "run 1",
      about: "batch 8",
      found,
      measured: null,
      isOfModel: true,
      ...others,
    },
    after,
    null,
    10,
  );

test("the words say what is less, where, and the time", () => {
  assert.deepEqual(words(before), {
    title: "Peak 340 MiB lower: 600 MiB before, 260 MiB now.",
    text:
      "Activations 350 MiB less. The largest part in layers.*: 350 MiB less. " +
      "A step takes 200 ms before, 250 ms now, by prediction.",
  });
  assert.equal(words(after).title, "The same peak: 260 MiB.");
  assert.match(words(stepOf([110, 60, 50], 0.2)).title, /^Peak 40.0 MiB higher: 220 MiB before/);
});

test("two pictures have one scale, whichever is drawn first and whatever each was before", () => {
  const size = { width: 400, height: 300, density: 1 };
  const scale = { bytes: 600 * MIB, kept: { top: 0 } };
  const drawn = (/** @type {any} */ { found: { timeline } }, /** @type {number} */ top) => {
    const groups = timeline.held.map((/** @type {any} */ held, /** @type {number} */ at) => ({
      ...{ name: `${at}`, label: "", colour: "#000000", pattern: "", held },
    }));
    const lines = { before: null, measured: null, limitBytes: 700 * MIB };
    const scene = { timeline, groups, ...lines, scale, dimmed: "", describe: () => 0, label: "" };
    return arranged(/** @type {any} */ (scene), size, [0, 1], { top, places: new Map() });
  };
  for (const order of [
    [before, after],
    [after, before],
  ]) {
    const [one, other] = order.map((each, at) => drawn(each, at * 9000 * MIB));
    assert.deepEqual(one.scale, other.scale);
    assert.ok(one.isLimitShown && other.isLimitShown);
    for (const bytes of [0, 260, 600, 700])
      assert.equal(one.yOf(bytes * MIB), other.yOf(bytes * MIB));
    assert.ok(one.yOf(700 * MIB) > one.top, "the limit is in both");
  }
});

test("another model has no modules in common, and what was not measured is not called so", () => {
  const other = words(before, { isOfModel: false });
  assert.doesNotMatch(other.text, /layers/);
  const held = (/** @type {number} */ mib, /** @type {number | null} */ seconds) =>
    /** @type {any} */ ({ how: "measured", peakBytes: mib * MIB, seconds });
  const measured = held(610, 0.21);
  assert.doesNotMatch(words(before, { measured }).text, /Measured/);
  const compared = { name: "run 1", about: "batch 8", found: before, measured, isOfModel: true };
  const both = differenceWords(compared, after, held(270, null), 10).text;
  assert.match(both, /Measured: 610 MiB in 210 ms a step before, 270 MiB now\.$/);
});

test("a run without a recording is compared as it was measured, and that is said", () => {
  const ran = { ...before, step: null, found: { ...before.found, how: "measured", trace: null } };
  const { title, text } = words(ran);
  assert.equal(title, "Peak 340 MiB lower: 600 MiB measured before, 260 MiB predicted now.");
  assert.doesNotMatch(text, /layers/);
});

test("what is on the sliders is said as the kernel says it of a run", () => {
  const setting = { batchSize: 8, accumulationSteps: 1, memoryBudget: 1 };
  assert.equal(settingWords(setting), "batch 8");
  const moved = { ...setting, accumulationSteps: 2, memoryBudget: 0.4 };
  assert.equal(settingWords(moved), "batch 8, accumulation 2, budget 0.4");
});
