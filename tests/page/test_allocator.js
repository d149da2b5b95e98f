/** The allocator's rules, counted by hand in MiB. */
import assert from "node:assert/strict";
import { test } from "node:test";
import { replay } from "../../memlab/_panel/page/allocator.js";

const MIB = 2 ** 20;

/**
 * @param {[number, number][]} events block and MiB, negative for a free
 * @param {{flushBefore?: number[], expandable?: boolean, limit?: number, stream?: number[],
 *     judgeOnly?: boolean}} [options] with the limit in MiB
 */
function held(events, options = {}) {
  const { flushBefore = [], expandable = false, limit, stream = null, judgeOnly } = options;
  const { reserved, allocated, failed } = replay({
    block: events.map(([block]) => block),
    bytes: events.map(([, mib]) => mib * MIB),
    stream,
    flushBefore,
    expandable,
    limitBytes: limit === undefined ? null : limit * MIB,
    judgeOnly,
  });
  const inMib = (/** @type {Float64Array} */ values) => [...values].map((bytes) => bytes / MIB);
  return { reserved: inMib(reserved), allocated: inMib(allocated), failed };
}

/** Blocks that are freed before the next, larger one. @type {[number, number][]} */
const GROWING = [12, 16, 20, 24].flatMap((mib, block) => [
  [block, mib],
  [block, -mib],
]);

test("requests are rounded up to 512 B and cut from segments of 2 and 20 MiB", () => {
  const found = held([
    [0, 1 / MIB],
    [1, 5],
    [2, 16],
    [0, -1 / MIB],
  ]);
  assert.deepEqual(found.reserved, [2, 22, 38, 38]);
  assert.deepEqual(found.allocated, [512 / MIB, 5 + 512 / MIB, 21 + 512 / MIB, 21]);
});

test("a rest of up to 1 MiB of a large block is not split off", () => {
  assert.deepEqual(held([[0, 19.5]]).allocated, [20]);
  assert.deepEqual(held([[0, 18.5]]).allocated, [18.5]);
});

test("of the free blocks the smallest that is large enough is taken", () => {
  const found = held([
    [0, 12],
    [1, 16],
    [0, -12],
    [1, -16],
    [2, 11.5],
    [3, 16],
  ]);
  assert.deepEqual(found.reserved, [12, 28, 28, 28, 28, 28]);
});

test("growing requests leave every segment behind, until they are given back", () => {
  assert.deepEqual(held(GROWING).reserved, [12, 12, 28, 28, 48, 48, 72, 72]);
  assert.deepEqual(held(GROWING, { flushBefore: [4] }).reserved, [12, 12, 28, 28, 20, 20, 44, 44]);
});

test("pages serve growing requests with what the largest takes", () => {
  const found = held(GROWING, { expandable: true });
  assert.deepEqual(found.reserved, [20, 20, 20, 20, 20, 20, 40, 40]);
  assert.deepEqual(found.allocated, held(GROWING).allocated);
});

test("pages between blocks in use are given back, and mapped again", () => {
  /** @type {[number, number][]} */
  const events = [
    [0, 20],
    [1, 20],
    [2, 20],
    [1, -20],
    [3, 1.5],
    [4, 20],
  ];
  assert.deepEqual(
    held(events, { expandable: true, flushBefore: [4] }).reserved,
    [20, 40, 60, 60, 60, 80],
  );
});

test("at a limit cached segments are given back, and then it is out of memory", () => {
  const enough = held(GROWING, { limit: 24 });
  assert.deepEqual(enough.reserved, [12, 12, 16, 16, 20, 20, 24, 24]);
  assert.equal(enough.failed, false);
  const little = held(GROWING, { limit: 23 });
  assert.deepEqual(little.reserved, [12, 12, 16, 16, 20, 20, 0, 0]);
  assert.equal(little.failed, true);
});

test("whether it runs is known without the bytes", () => {
  for (const limit of [23, 24]) {
    const found = held(GROWING, { limit, judgeOnly: true });
    assert.deepEqual(found.reserved, []);
    assert.equal(found.failed, limit < 24);
  }
});

test("a stream does not take what was freed on another one", () => {
  /** @type {[number, number][]} */
  const events = [
    [0, 12],
    [0, -12],
    [1, 12],
  ];
  assert.deepEqual(held(events, { stream: [0, 0, 1] }).reserved, [12, 12, 24]);
  assert.deepEqual(held(events, { stream: [0, 0, 0] }).reserved, [12, 12, 12]);
});
