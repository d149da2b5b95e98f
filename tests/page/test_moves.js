/** What a person changes: numbered, sent in good time, undone, and never moved back by an old echo. */
import assert from "node:assert/strict";
import { test } from "node:test";
import { Moves, Outbox } from "../../memlab/_panel/page/moves.js";
import { familyKey, settingOf, share, wholeNumber } from "../../memlab/_panel/page/settings.js";
import { AT_FIRST, Store, fromLink, toLink } from "../../memlab/_panel/page/store.js";

const SET = { batch_size: 8, accumulation_steps: 1, precision: "fp32" };

test("an echo of an older move does not move a slider back", () => {
  const moves = new Moves("here", () => 0);
  moves.make({ batch_size: 16 });
  moves.make({ batch_size: 32, precision: "bf16" });
  moves.confirm("here", 1);
  assert.deepEqual(moves.over({ ...SET, batch_size: 16 }), {
    ...SET,
    batch_size: 32,
    precision: "bf16",
  });
  moves.confirm("here", 2);
  assert.deepEqual(moves.over(SET), SET, "what the kernel has seen, it may change");
});

test("what others set is taken over, but for what the kernel has not seen yet", () => {
  const moves = new Moves("here", () => 0);
  moves.make({ batch_size: 16 });
  moves.confirm("elsewhere", 7);
  assert.deepEqual(moves.over({ ...SET, accumulation_steps: 4 }), {
    ...SET,
    accumulation_steps: 4,
    batch_size: 16,
  });
});

test("a change that is never confirmed is forgotten after a while", () => {
  let now = 0;
  const moves = new Moves("here", () => now);
  moves.make({ batch_size: 16 });
  now = 6000;
  assert.deepEqual(moves.over(SET), SET);
});

test("the first change is sent at once, others together, the last always", (context) => {
  context.mock.timers.enable({ apis: ["setTimeout"] });
  /** @type {object[]} */
  const sent = [];
  const outbox = new Outbox((changes) => sent.push(changes), 80, 200);
  for (let batch_size = 1; batch_size <= 15; batch_size += 1) {
    outbox.add({ batch_size });
    context.mock.timers.tick(20);
  }
  outbox.add({ precision: "bf16" });
  context.mock.timers.tick(80);
  assert.deepEqual(sent, [
    { batch_size: 1 },
    { batch_size: 10 },
    { batch_size: 15, precision: "bf16" },
  ]);
  context.mock.timers.tick(1000);
  assert.equal(sent.length, 3, "nothing is sent twice");
});

test("a store undoes every setting, and tells what has changed", () => {
  /** @type {object[]} */
  const told = [];
  const state = { ...AT_FIRST, fields: SET };
  const store = new Store(state, (changes) => told.push(changes));
  store.move({ precision: "bf16" });
  store.move({ precision: "bf16" });
  store.move({ batch_size: 16 });
  store.receive({ ...SET, accumulation_steps: 4 }, "kernel");
  store.adopt({ ...SET, accumulation_steps: 4 });
  store.undo();
  assert.deepEqual(store.state.fields, { ...SET, precision: "bf16", batch_size: 16 });
  store.undo();
  store.undo();
  assert.deepEqual(store.state.fields, SET);
  store.redo();
  assert.deepEqual(store.state.fields, { ...SET, precision: "bf16" });
  assert.deepEqual(told, [
    { precision: "bf16" },
    { batch_size: 16 },
    { batch_size: 16, accumulation_steps: 1, precision: "bf16" },
    { batch_size: 8 },
    { precision: "fp32" },
    { precision: "bf16" },
  ]);
});

test("a link keeps what sliders move, and nonsense in it changes nothing", () => {
  const fields = { ...SET, memory_budget: 0.5, memory_limit: "8 GiB" };
  const state = { ...AT_FIRST, fields };
  const moved = { ...state, fields: { ...fields, batch_size: 64, memory_budget: 0 } };
  assert.deepEqual(fromLink(toLink(moved), state), moved);
  assert.deepEqual(fromLink("#batch_size=-3&memory_budget=7&accumulation_steps=x", state), state);
});

test("numbers are read as people write them, and nothing else is a number", () => {
  for (const text of ["1024", "1,024", "1 024"]) assert.equal(wholeNumber(text), 1024, text);
  for (const text of [
    "",
    " ",
    "12abc",
    "1e3",
    "2.5",
    "1,5",
    "1,000,00",
    "0,001",
    "1,024 500",
    "-1",
    "0",
    "9999999999",
  ])
    assert.equal(wholeNumber(text), null, text);
  assert.equal(share("40 %"), 0.4);
  assert.equal(share("0,5"), 0.5);
  for (const text of ["", "x", "1.5", "-0.1"]) assert.equal(share(text), null, text);
  assert.equal(settingOf({ ...SET, memory_budget: 1, batch_size: "12abc" }), null);
});

test("an estimate depends on all but what it moves", () => {
  const key = familyKey(SET);
  assert.equal(familyKey({ ...SET, batch_size: 64, memory_limit: "8 GiB" }), key);
  assert.equal(familyKey({ precision: "fp32", accumulation_steps: 2 }), key, "in any order");
  assert.notEqual(familyKey({ ...SET, precision: "bf16" }), key);
});

test("what waits for one workload is not sent with the next", (context) => {
  context.mock.timers.enable({ apis: ["setTimeout"] });
  /** @type {any[]} */
  const sent = [];
  const outbox = new Outbox((changes) => sent.push(changes), 80, 200);
  outbox.add({ sample_size: 0 });
  outbox.add({ sample_size: 128 });
  outbox.add({ workload: "vit-digits" });
  context.mock.timers.tick(80);
  assert.deepEqual(sent, [{ sample_size: 0 }, { sample_size: 128 }, { workload: "vit-digits" }]);
});
