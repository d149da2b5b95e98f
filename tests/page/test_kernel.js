/** The kernel's side of a panel, played by a fake model: what is asked of it, and when. */
import assert from "node:assert/strict";
import { test } from "node:test";
import { resultFile } from "./files.js";
import { Kernel } from "../../memlab/_panel/page/kernel.js";

const FIELDS = { workload: "gpt", batch_size: 8, accumulation_steps: 1, memory_budget: 1 };
const el = /** @type {any} */ ({ closest: () => null });

/** A model as anywidget gives it, with what was sent. @param {Record<string, any>} traits */
function modelOf(traits = {}) {
  /** @type {Record<string, ((...given: any[]) => void)[]>} */
  const handlers = {};
  /** @type {any[]} */
  const sent = [];
  /** @type {Record<string, any>} */
  const state = {
    asked: { by: "kernel", move: 0, fields: FIELDS },
    answer: { by: "kernel", move: 0, family: "1", steps: [4, 5], run: null },
    job: { running: false, byCell: "" },
    runs: { rows: [] },
    ...traits,
  };
  const fire = (/** @type {string} */ name, /** @type {any[]} */ ...given) =>
    (handlers[name] ?? []).forEach((act) => act(...given));
  return {
    state,
    sent,
    fire,
    get: (/** @type {string} */ name) => state[name],
    on: (/** @type {string} */ name, /** @type {() => void} */ act) =>
      void (handlers[name] ??= []).push(act),
    off: (/** @type {string} */ name) => void (handlers[name] = []),
    send: (/** @type {any} */ message) => void sent.push(message),
    /** As ipywidgets says it, with the view as `this`. */
    fireLive: (/** @type {boolean} */ isLive) =>
      handlers["comm_live_update"].forEach((act) => act.call({ model: { comm_live: isLive } })),
    set(/** @type {string} */ name, /** @type {any} */ value) {
      state[name] = value;
      fire(`change:${name}`);
    },
  };
}

test("a page begins with what the traits say, and asks once for what it lacks", () => {
  const rows = [
    { number: 2, isCompared: true, isPredicted: false },
    { number: 3, isCompared: true, isPredicted: true }, // a kept prediction
  ];
  const model = modelOf({ runs: { rows } });
  const kernel = new Kernel(model, el);
  assert.deepEqual(kernel.store.state.fields, FIELDS);
  assert.ok(kernel.isCurrent);
  assert.deepEqual(model.sent, [
    { type: "need", steps: [4, 5], runs: [2, 3], csv: false },
    { type: "open", by: kernel.id, panes: [], begins: true },
  ]);
  model.set("answer", { ...model.state.answer, run: 2, steps: [4, 5, 6] });
  assert.deepEqual(model.sent.slice(2), [{ type: "need", steps: [6], runs: [], csv: false }]);
  kernel.close();
});

test("a press of Run takes with it what the kernel does not know", () => {
  const model = modelOf();
  const kernel = new Kernel(model, el);
  const by = kernel.id;
  model.sent.length = 0;
  kernel.store.move({ batch_size: 16 });
  kernel.store.move({ batch_size: 32 });
  assert.ok(!kernel.isCurrent);
  kernel.tell({ type: "run" });
  assert.deepEqual(model.sent, [
    { type: "set", by, move: 1, fields: { batch_size: 16 } },
    { type: "run", by, move: 2, fields: { batch_size: 32 } },
  ]);
  model.set("asked", { by, move: 2, fields: { ...FIELDS, batch_size: 32 } });
  model.set("answer", { ...model.state.answer, by, move: 2 });
  assert.ok(kernel.isCurrent);
  kernel.tell({ type: "run" });
  assert.deepEqual(model.sent.at(-1), { type: "run", by, move: 2, fields: {} });
  kernel.close();
});

test("a press of Run does not take the sizes of the workload before to the next", () => {
  const model = modelOf();
  const kernel = new Kernel(model, el);
  const by = kernel.id;
  model.sent.length = 0;
  kernel.store.move({ batch_size: 16 });
  kernel.store.move({ workload: "lstm" });
  kernel.store.move({ memory_budget: 0.5 });
  kernel.tell({ type: "run" });
  assert.deepEqual(model.sent, [
    { type: "set", by, move: 1, fields: { batch_size: 16 } },
    { type: "set", by, move: 2, fields: { workload: "lstm" } },
    { type: "run", by, move: 3, fields: { workload: "lstm", memory_budget: 0.5 } },
  ]);
  kernel.close();
});

test("what is asked of the settings on screen is asked of those that a hand has just set", () => {
  for (const type of ["fit", "use", "compareBase"]) {
    const model = modelOf();
    const kernel = new Kernel(model, el);
    kernel.store.move({ batch_size: 16 });
    kernel.store.move({ batch_size: 32 });
    kernel.tell({ type, at: 1 });
    const { by, move, fields } = model.sent.at(-1);
    assert.deepEqual([by, move, fields], [kernel.id, 2, { batch_size: 32 }], type);
    assert.deepEqual(kernel.outbox.waiting, {}, "nothing comes later");
    kernel.close();
  }
});

test("after the end of its kernel a panel still moves, says so and offers no Stop", () => {
  const model = modelOf();
  const kernel = new Kernel(model, el);
  model.set("job", { running: true, byCell: false });
  model.send = () => {
    throw new Error("Cannot send"); // as JupyterLab's channels do
  };
  kernel.store.move({ batch_size: 16 });
  assert.equal(kernel.store.state.fields.batch_size, 16);
  assert.equal(kernel.trouble, "gone");
  assert.equal(kernel.job.running, false);
  kernel.close();
});

test("an old echo changes nothing; what the kernel sets can be undone", () => {
  const model = modelOf();
  const kernel = new Kernel(model, el);
  const by = kernel.id;
  kernel.store.move({ batch_size: 16 });
  kernel.store.move({ batch_size: 32 });
  model.set("asked", { by, move: 1, fields: { ...FIELDS, batch_size: 16 } });
  assert.equal(kernel.store.state.fields.batch_size, 32);
  model.set("asked", { by, move: 2, fields: { ...FIELDS, batch_size: 32, sample_size: 128 } });
  assert.equal(kernel.store.state.fields.sample_size, 128, "which the kernel has added");
  model.set("asked", { by: "kernel", move: 3, fields: { ...FIELDS, batch_size: 4 } });
  assert.equal(kernel.store.state.fields.batch_size, 4);
  kernel.store.undo();
  assert.equal(kernel.store.state.fields.batch_size, 32);
  kernel.close();
});

test("a drag in another tab is undone as one move, and so is all that a search moves", (context) => {
  let now = 0;
  context.mock.method(performance, "now", () => now);
  const model = modelOf();
  const kernel = new Kernel(model, el);
  let move = 0;
  /** @param {string} by @param {Record<string, any>} changes @param {number} later milliseconds */
  const others = (by, changes, later) => {
    [now, move] = [now + later, move + 1];
    model.set("asked", { by, move, fields: { ...model.state.asked.fields, ...changes } });
  };
  for (const batch_size of [12, 16, 24, 32]) others("another tab", { batch_size }, 80);
  others("another tab", { accumulation_steps: 2 }, 80);
  others("another tab", { accumulation_steps: 4 }, 5000);
  for (const memory_budget of [0.5, 0.7, 0.8]) others("search 1", { memory_budget }, 5000);
  others("search 2", { memory_budget: 0.9 }, 80);
  /** @type {any[]} */
  const undone = [];
  while (kernel.store.past.length) {
    kernel.store.undo();
    const { batch_size, accumulation_steps, memory_budget } = kernel.store.state.fields;
    undone.push([batch_size, accumulation_steps, memory_budget]);
  }
  assert.deepEqual(undone, [
    [32, 4, 0.8],
    [32, 4, 1],
    [32, 2, 1],
    [32, 1, 1],
    [8, 1, 1],
  ]);
  kernel.close();
});

test("recordings of other settings are not used", () => {
  const model = modelOf();
  const kernel = new Kernel(model, el);
  kernel.recorded.set(4, /** @type {any} */ ("a recording"));
  const { fields } = kernel.store.state;
  assert.deepEqual(kernel.stepsFor({ ...fields, batch_size: 64 }), ["a recording"]);
  assert.equal(kernel.stepsFor(fields), kernel.stepsFor(fields), "the same list");
  assert.deepEqual(kernel.stepsFor({ ...fields, workload: "lstm" }), []);
  model.set("answer", { ...model.state.answer, family: null, steps: [] });
  assert.deepEqual(kernel.stepsFor(fields), [], "nothing is known any more");
  kernel.close();
});

test("the recordings of a compared run are asked for, and are those of that run alone", () => {
  const model = modelOf({
    answer: {
      ...{ by: "kernel", move: 0, family: "1", steps: [4], run: null },
      compared: { run: 2, steps: [4, 7] },
    },
  });
  const kernel = new Kernel(model, el);
  assert.deepEqual(model.sent[0], { type: "need", steps: [4, 7], runs: [], csv: false });
  kernel.recorded.set(7, /** @type {any} */ ("a recording"));
  const [first, second] = [1, 2].map((number) => /** @type {any} */ ({ number }));
  assert.deepEqual(kernel.stepsOf(second), ["a recording"]);
  assert.equal(kernel.stepsOf(second), kernel.stepsOf(second), "the same list");
  assert.deepEqual(kernel.stepsOf(first), []);
  model.set("answer", { ...model.state.answer, compared: null });
  assert.deepEqual(kernel.stepsOf(second), []);
  kernel.close();
});

test("what a run held comes as a file, and stays while the limit moves", async () => {
  const model = modelOf();
  const kernel = new Kernel(model, el);
  const { fields } = kernel.store.state;
  model.set("answer", { ...model.state.answer, run: 7 });
  const files = { 7: resultFile({ parameters: [1, 2 ** 40 - 1] }), 8: resultFile({}) };
  for (const [id, file] of Object.entries(files)) {
    const bytes = new Uint8Array([0, 0, 0, ...file]); // in a message they need not be aligned
    model.fire("msg:custom", { type: "run", id: Number(id) }, [new DataView(bytes.buffer, 3)]);
  }
  while (!kernel.lines.has(8)) await new Promise((done) => setTimeout(done));
  const held = kernel.measured(7);
  assert.deepEqual([...(held?.timeline.total ?? [])], [1, 2 ** 40]);
  assert.deepEqual([...(held?.timeline.microBatch ?? [])], [0, 0]);
  assert.equal(kernel.measured(8), null, "it failed before it held anything");

  assert.equal(kernel.ran(fields), held);
  kernel.store.move({ memory_limit: "2 GiB" });
  assert.ok(!kernel.isCurrent);
  assert.equal(kernel.ran(kernel.store.state.fields), held);
  kernel.store.move({ batch_size: 64 });
  assert.equal(kernel.ran(kernel.store.state.fields), null, "another step");
  model.set("answer", { ...model.state.answer, run: null });
  assert.equal(kernel.ran(fields), null, "the kernel says that it was not run");
  kernel.close();
});

test("a kernel that has died is said, and one that does not answer", (context) => {
  context.mock.timers.enable({ apis: ["setTimeout"] });
  const model = modelOf();
  const kernel = new Kernel(model, el);
  kernel.store.move({ batch_size: 16 });
  context.mock.timers.tick(15_000);
  assert.equal(kernel.trouble, "silent");
  model.set("job", { running: true });
  assert.equal(kernel.trouble, "", "it speaks");
  model.fire("comm_live_update");
  assert.equal(kernel.trouble, "gone");
  const dead = /** @type {any} */ ({ closest: () => ({}) });
  assert.equal(new Kernel(modelOf(), dead).trouble, "gone", "when a tab is opened again");
  kernel.close();
});

test("a recording that has not come is asked for again, until the panel is closed", (context) => {
  context.mock.timers.enable({ apis: ["setTimeout"] });
  const model = modelOf();
  const kernel = new Kernel(model, el);
  const asked = () => model.sent.filter(({ type }) => type === "need").map(({ steps }) => steps);
  kernel.recorded.set(4, /** @type {any} */ ({}));
  context.mock.timers.tick(10_000);
  assert.deepEqual(asked(), [[4, 5], [5]]);
  kernel.recorded.set(5, /** @type {any} */ ({}));
  context.mock.timers.tick(20_000);
  assert.equal(asked().length, 2, "all have come");
  model.set("answer", { ...model.state.answer, steps: [6] });
  kernel.close();
  context.mock.timers.tick(60_000);
  assert.deepEqual(asked(), [[4, 5], [5], [6]]);
});

test("what was lost while no kernel heard is told and asked once one does", (context) => {
  context.mock.timers.enable({ apis: ["setTimeout"] });
  const model = modelOf();
  const kernel = new Kernel(model, /** @type {any} */ ({ closest: () => ({}) }));
  const by = kernel.id;
  assert.equal(kernel.trouble, "gone");
  kernel.store.move({ batch_size: 16 });
  context.mock.timers.tick(30_000);
  model.sent.length = 0;
  model.fireLive(true);
  assert.equal(kernel.trouble, "");
  assert.deepEqual(model.sent, [
    { type: "open", by, panes: [] },
    { type: "set", by, move: 2, fields: { batch_size: 16 } },
    { type: "need", steps: [4, 5], runs: [], csv: false },
  ]);
  model.fireLive(true);
  assert.equal(model.sent.length, 3, "nothing was lost meanwhile");
  kernel.close();
});

test("what has not come is asked for again, though no kernel heard for a while", (context) => {
  context.mock.timers.enable({ apis: ["setTimeout"] });
  const model = modelOf();
  const kernel = new Kernel(model, el);
  kernel.trouble = "gone";
  context.mock.timers.tick(10_000);
  kernel.trouble = "";
  model.sent.length = 0;
  context.mock.timers.tick(10_000);
  assert.equal(model.sent.length, 1);
  kernel.close();
});

test("settings that were lost are said again once nothing is heard", (context) => {
  context.mock.timers.enable({ apis: ["setTimeout"] });
  const model = modelOf();
  const kernel = new Kernel(model, el);
  kernel.store.move({ batch_size: 16 });
  model.sent.length = 0;
  context.mock.timers.tick(15_000);
  assert.equal(kernel.trouble, "silent");
  const set = { type: "set", by: kernel.id, move: 2, fields: { batch_size: 16 } };
  assert.deepEqual(
    model.sent.filter(({ type }) => type === "set"),
    [set],
  );
  kernel.close();
  model.sent.length = 0;
  context.mock.timers.tick(60_000);
  assert.deepEqual(model.sent, []);
});

test("a Run that is not answered is said", (context) => {
  context.mock.timers.enable({ apis: ["setTimeout"] });
  const model = modelOf();
  const kernel = new Kernel(model, el);
  kernel.tell({ type: "run" });
  context.mock.timers.tick(15_000);
  assert.equal(kernel.trouble, "silent");
  model.set("job", { running: false });
  kernel.tell({ type: "run" });
  model.set("job", { running: true });
  context.mock.timers.tick(15_000);
  assert.equal(kernel.trouble, "");
  kernel.close();
});
