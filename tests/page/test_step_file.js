/** What is no step file is refused with a sentence. */
import assert from "node:assert/strict";
import { test } from "node:test";
import { gzipSync } from "node:zlib";
import { fileOf } from "./files.js";
import { StepFileError, readStepFile } from "../../memlab/_panel/page/step_file.js";

const VALUES = [1.5, -2, 2 ** 40];

/** A file with one array. @param {object} [changed] fields of its header @param {number} [cut] */
const file = (changed = {}, cut = 0) =>
  fileOf(
    { format: "memlab step", version: 1, ...changed },
    { block_bytes: Float64Array.from(VALUES) },
    cut,
  );

/** @param {Uint8Array} bytes @param {RegExp} said */
async function refused(bytes, said) {
  await assert.rejects(readStepFile(bytes), (error) => {
    assert.ok(error instanceof StepFileError, String(error));
    assert.match(error.message, said);
    return true;
  });
}

const DAMAGED = /^this is not a step that memlab recorded, or the file is damaged$/;

test("a file is read, whatever the length of its header", async () => {
  for (let length = 0; length < 9; length += 1) {
    const { header, arrays } = await readStepFile(file({ differs: "x".repeat(length) }));
    assert.equal(header.differs.length, length);
    assert.deepEqual([...arrays.block_bytes], VALUES);
  }
});

test("anything else is no step", async () => {
  await refused(new Uint8Array(), DAMAGED);
  await refused(Buffer.from("a text"), DAMAGED);
  await refused(gzipSync("a compressed text"), DAMAGED);
  await refused(gzipSync(""), DAMAGED);
  await refused(file({ format: "another" }), /^this is not a step that memlab recorded$/);
});

test("a damaged file is refused", async () => {
  const whole = file();
  for (const length of [5, 20, whole.length - 9, whole.length - 1]) {
    await refused(whole.subarray(0, length), DAMAGED);
  }
  const changed = Buffer.from(whole);
  changed[whole.length - 6] ^= 255; // its checksum
  await refused(changed, DAMAGED);
});

test("a truncated file is refused", async () => {
  await refused(file({}, 8), DAMAGED);
  await refused(file({}, 60), DAMAGED);
});

test("a header that says something impossible is refused", async () => {
  await refused(file({ arrays: [["block_bytes", "float64", 1000]] }), DAMAGED);
  await refused(file({ arrays: [["block_bytes", "complex64", 1]] }), DAMAGED);
  await refused(file({ arrays: null }), DAMAGED);
});

test("a file of a newer memlab says so", async () => {
  await refused(file({ version: 2, arrays: [["x", "float16", 1]] }), /newer memlab.*update memlab/);
});
