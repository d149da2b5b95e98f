// The arithmetic of the timeline's picture. Run by `node --test tests/page/test_layout.js`.
import assert from "node:assert/strict";
import test from "node:test";
import {
  CATEGORY_STYLES,
  MODULE_COLOURS,
  contrast,
  inkOn,
} from "../../memlab/_panel/page/colours.js";
import { SvgPen, toCsv } from "../../memlab/_panel/page/export.js";
import {
  axisOf,
  bandsOf,
  columnsOf,
  instantAt,
  labelPlace,
  positions,
  scaleOf,
  stacked,
} from "../../memlab/_panel/page/layout.js";
import { formatBytes } from "../../memlab/_panel/page/words.js";
import { CATEGORIES, PHASES } from "../../memlab/_panel/page/recorded_step.js";

const [FORWARD, BACKWARD, OPTIMIZER] = ["forward", "backward", "optimizer"].map((name) =>
  PHASES.indexOf(name),
);
const MIB = 2 ** 20;
const GIB = 2 ** 30;

/** @type {(operator: number[], phase: number[], total?: number[]) => any} */
const timelineOf = (operator, phase, total = operator.map(() => 1)) => ({
  held: CATEGORIES.map(() => Float64Array.from(total, () => 0)),
  total: Float64Array.from(total),
  phase: Uint8Array.from(phase),
  microBatch: new Int32Array(operator.length),
  operator: Int32Array.from(operator),
});

test("sizes are written as in Python", () => {
  /** @type {[number, string][]} */
  const expected = [
    [0, "0 B"],
    [1023, "1023 B"],
    [1024, "1.00 KiB"],
    [1406142546, "1.31 GiB"],
    [-512 * MIB, "-512 MiB"],
    [10 * GIB, "10.0 GiB"],
    [1.5 * 2 ** 40, "1.50 TiB"],
    [153 * MIB, "153 MiB"],
  ];
  for (const [bytes, text] of expected) assert.equal(formatBytes(bytes), text);
});

test("an instant lies by its operator, and within it by its order", () => {
  const timeline = timelineOf([0, 0, 1, 3], [2, 2, 2, 3]);
  assert.deepEqual([...positions(timeline)], [0, 0.125, 0.25, 0.75]);
});

test("the optimizer phase takes a fifth at most", () => {
  // as memlab.figures.timeline.positions gives it
  const timeline = timelineOf([0, 1, 2, 3, 4, 5, 6, 7, 8, 9], [2, 2, ...Array(8).fill(OPTIMIZER)]);
  const x = positions(timeline);
  assert.equal(x[1], 0.4);
  assert.ok(Math.abs(x[2] - 0.8) < 1e-12 && Math.abs(x[6] - 0.9) < 1e-12);
  assert.equal(axisOf(timeline).tail, 0.8);
  const short = timelineOf([0, 1, 2, 3, 4, 5, 6, 7, 8, 9], [...Array(9).fill(3), OPTIMIZER]);
  assert.equal(positions(short)[9], 0.9);
});

test("a measured step lies by the operators of its prediction", () => {
  const predicted = timelineOf([0, 1, 2, 3, 4, 5, 6, 7, 8, 9], [2, 2, ...Array(8).fill(OPTIMIZER)]);
  const measured = timelineOf([0, 1, 1, 4], [2, 2, 2, OPTIMIZER]);
  const [x, y] = [positions(predicted), positions(measured, axisOf(predicted))];
  assert.equal(y[1], x[1]);
  assert.equal(y[3], x[4]);
});

test("an empty timeline has no places", () => {
  assert.equal(positions(timelineOf([], [])).length, 0);
});

test("no peak is lost in columns, at any zoom", () => {
  const count = 5000;
  const x = Float64Array.from({ length: count }, (_, at) => at / count);
  for (const needle of [0, 1, 2499, 4998, 4999]) {
    const total = Float64Array.from({ length: count }, (_, at) =>
      at === needle ? 9 : Math.abs(Math.sin(at)),
    );
    for (const columns of [1, 7, 333, 4999, 5000, 12000]) {
      assert.ok(
        columnsOf(x, total, [0, 1], columns).includes(needle),
        `${needle} in ${columns} columns`,
      );
    }
    /** @type {[number, number]} */
    const near = [Math.max(0, x[needle] - 0.01), Math.min(1, x[needle] + 0.01)];
    assert.ok(columnsOf(x, total, near, 50).includes(needle));
  }
});

test("an empty column shows the last instant before it, not the highest", () => {
  const x = Float64Array.of(0, 0.1, 0.15, 0.9);
  const rows = columnsOf(x, Float64Array.of(1, 9, 2, 3), [0, 1], 5);
  assert.deepEqual([...rows], [1, 2, 2, 2, 3]);
  assert.deepEqual([...columnsOf(x, Float64Array.of(1, 9, 2, 3), [0.4, 0.6], 3)], [2, 2, 2]);
});

test("the instant at a place", () => {
  const x = Float64Array.of(0, 0.5, 0.5, 0.7);
  assert.deepEqual(
    [-1, 0, 0.4, 0.5, 0.6, 2].map((place) => instantAt(x, place)),
    [0, 0, 0, 2, 2, 3],
  );
});

test("areas stand on one another", () => {
  const groups = [{ held: Float64Array.of(1, 2, 3) }, { held: Float64Array.of(10, 0, 5) }];
  assert.deepEqual(
    stacked(groups, Int32Array.of(2, 0)).map((tops) => [...tops]),
    [
      [3, 1],
      [8, 11],
    ],
  );
});

test("ticks are powers of two in one unit", () => {
  const { top, ticks } = scaleOf(7.6 * GIB);
  assert.ok(top > 7.6 * GIB);
  assert.deepEqual(
    ticks.map(({ text }) => text),
    ["0", "2 GiB", "4 GiB", "6 GiB", "8 GiB"],
  );
  assert.deepEqual(
    scaleOf(256 * MIB, 0, 5).ticks.map(({ text }) => text),
    ["0", "64 MiB", "128 MiB", "192 MiB", "256 MiB"],
  );
  assert.ok(scaleOf(0).ticks.length >= 1);
});

test("a scale stays while it serves", () => {
  const { top } = scaleOf(100);
  assert.equal(scaleOf(90, top).top, top);
  assert.ok(scaleOf(120, top).top > 120, "a higher peak needs more");
  assert.ok(scaleOf(30, top).top < top, "a low picture would be flat");
});

test("bands too narrow to be seen are merged", () => {
  const x = Float64Array.from({ length: 100 }, (_, at) => at / 100);
  const wide = bandsOf(
    x,
    Array.from(x, (place) => (place < 0.4 ? FORWARD : BACKWARD)),
    [0, 1],
    0.05,
  );
  assert.deepEqual(
    wide.map(({ first, last, to }) => [first, last, to]),
    [
      [FORWARD, FORWARD, 0.4],
      [BACKWARD, BACKWARD, 1],
    ],
  );
  const narrow = bandsOf(
    x,
    Array.from(x, (_, at) => at % 2),
    [0, 1],
    0.05,
  );
  assert.deepEqual(narrow, [{ from: 0, to: 1, first: 0, last: 1 }]);
  assert.equal(
    bandsOf(
      x,
      Array.from(x, (_, at) => at % 2),
      [0.5, 0.52],
      0.05,
    ).length,
    2,
    "a zoom shows them",
  );
});

test("a label goes where there is most room, and stays there", () => {
  const bottoms = new Float64Array(100);
  const tops = Float64Array.from({ length: 100 }, (_, at) => (at >= 60 && at < 90 ? 30 : 20));
  const found = labelPlace([bottoms, tops], [20, 15]);
  assert.ok(found);
  assert.ok(found.column - 10 >= 60 && found.column + 10 <= 90);
  assert.equal(found.bytes, 15);
  assert.equal(labelPlace([bottoms, tops], [20, 15], 30)?.column, 30);
  assert.equal(labelPlace([bottoms, tops], [20, 31]), null);
  assert.equal(labelPlace([bottoms, tops], [101, 15]), null);
});

test("areas that can be neighbours differ for every kind of colour vision", () => {
  const styles = CATEGORY_STYLES;
  assert.deepEqual(styles.map(({ name }) => name).sort(), [...CATEGORIES].sort());
  for (const a of styles) {
    for (const b of styles) {
      // any two touch where those between them are empty
      if (a !== b && a.pattern === b.pattern)
        assert.ok(difference(a.colour, b.colour) > 15, `${a.name}, ${b.name}`);
    }
  }
  MODULE_COLOURS.forEach((colour, at) => {
    for (const next of [1, 2]) {
      assert.ok(
        difference(colour, MODULE_COLOURS[(at + next) % 12]) > (next === 1 ? 30 : 20),
        colour,
      );
    }
  });
  assert.equal(new Set(MODULE_COLOURS).size, 12);
});

test("text on every area is legible", () => {
  for (const colour of [...CATEGORY_STYLES.map((style) => style.colour), ...MODULE_COLOURS]) {
    assert.ok(contrast(colour, inkOn(colour)) >= 4.5, colour);
  }
});

test("CSV has every instant in exact bytes", () => {
  const timeline = timelineOf([0, 1], [FORWARD, OPTIMIZER], [5, 2 ** 40]);
  const groups = [
    { name: 'block "1", a', held: Float64Array.of(5, 1) },
    { name: "other", held: Float64Array.of(0, 2 ** 40 - 1) },
  ];
  assert.deepEqual(toCsv(/** @type {any} */ ({ timeline, groups })).split("\n"), [
    'instant,phase,micro_batch,operator,total_bytes,"block ""1"", a_bytes",other_bytes',
    "0,forward,0,0,5,5,0",
    `1,optimizer,0,1,${2 ** 40},1,${2 ** 40 - 1}`,
    "",
  ]);
});

test("SVG escapes what people write", () => {
  const pen = new SvgPen(/** @type {any} */ ({ measureText: () => ({ width: 1 }) }), "id");
  pen.fillText('a<b> & "c"', 1, 2);
  const svg = pen.toSvg(10, 10, "<title>");
  assert.ok(svg.includes("a&#60;b&#62; &#38; &#34;c&#34;") && svg.includes("&#60;title&#62;"));
});

test("200,000 instants are laid out in less than a frame or two", () => {
  const count = 200_000;
  const operator = Array.from({ length: count }, (_, at) => at >> 1);
  const timeline = timelineOf(
    operator,
    operator.map((at) => (at < 90_000 ? FORWARD : OPTIMIZER)),
    operator.map((at) => at % 977),
  );
  const groups = Array.from({ length: 7 }, () => ({ held: timeline.total }));
  let best = Infinity; // the machine may be busy
  for (let run = 0; run < 5; run += 1) {
    const began = performance.now();
    const rows = columnsOf(positions(timeline), timeline.total, [0, 1], 2600);
    stacked(groups, rows);
    best = Math.min(best, performance.now() - began);
  }
  console.log(`# ${best.toFixed(1)} ms`);
  assert.ok(best < 100, `${best} ms`);
});

// Machado, Oliveira and Fernandes 2009: how a colour looks without one kind of cone
const SIGHTS = [
  [1, 0, 0, 0, 1, 0, 0, 0, 1],
  [0.152286, 1.052583, -0.204868, 0.114503, 0.786281, 0.099216, -0.003882, -0.048116, 1.051998],
  [0.367322, 0.860646, -0.227968, 0.280085, 0.672501, 0.047413, -0.01182, 0.04294, 0.968881],
  [1.255528, -0.076749, -0.178779, -0.078411, 0.930809, 0.147602, 0.004733, 0.691367, 0.3039],
];

/** The least distance in CIE Lab, over kinds of sight. @param {string} a @param {string} b */
function difference(a, b) {
  return Math.min(
    ...SIGHTS.map((sight) =>
      Math.hypot(...lab(a, sight).map((value, at) => value - lab(b, sight)[at])),
    ),
  );
}

/** @param {string} colour @param {number[]} sight */
function lab(colour, sight) {
  const light = [1, 3, 5].map((at) => {
    const value = parseInt(colour.slice(at, at + 2), 16) / 255;
    return value <= 0.04045 ? value / 12.92 : ((value + 0.055) / 1.055) ** 2.4;
  });
  const seen = [0, 3, 6].map((row) =>
    Math.min(
      1,
      Math.max(
        0,
        light.reduce((sum, value, at) => sum + value * sight[row + at], 0),
      ),
    ),
  );
  const root = (/** @type {number} */ value) =>
    value > 216 / 24389 ? Math.cbrt(value) : ((24389 / 27) * value + 16) / 116;
  const [x, y, z] = [
    [0.4339, 0.3762, 0.1899],
    [0.2126, 0.7152, 0.0722],
    [0.0177, 0.1095, 0.8728],
  ].map((row) => root(row.reduce((sum, share, at) => sum + share * seen[at], 0)));
  return [116 * y - 16, 500 * (x - y), 200 * (y - z)];
}
