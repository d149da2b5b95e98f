/**
 * What moves over a timeline's picture: where a pointer is, what is selected, and the reading there.
 *
 * @typedef {import("./timeline_picture.js").Arranged} Arranged
 * @typedef {import("./timeline_picture.js").Pen} Pen
 * @typedef {import("./timeline_picture.js").Theme} Theme
 *
 * @typedef {object} Marks
 * @property {number | null} selected instant
 * @property {number | null} pointed instant
 * @property {import("./layout.js").Range | null} range that is being dragged over
 * @property {boolean} isFocused
 */

import { clamped } from "./layout.js";
import { fill, fillBox, path, setFont, stroke, write } from "./timeline_picture.js";

const LINE_HEIGHT = 17;
const PADDING = 9;
const NARROW = 480; // pixels

/** @param {Pen} pen @param {Arranged} at @param {Theme} theme @param {Marks} marks */
export function drawOverlay(pen, at, theme, { selected, pointed, range, isFocused }) {
  if (!at.x.length) return;
  if (range) {
    const [from, to] = range.map(at.xOf);
    fillBox(pen, theme.ink, [from, at.top, to - from, at.bottom - at.top], 0.14);
  }
  if (selected !== null) drawCross(pen, at, selected, theme, true);
  if (pointed !== null && pointed !== selected) drawCross(pen, at, pointed, theme, false);
  const read = pointed ?? (isFocused ? selected : null);
  if (read !== null && !at.scene.dimmed && isInside(at, read)) drawReading(pen, at, read, theme);
}

/** @param {Arranged} at @param {number} instant */
const isInside = (at, instant) => at.x[instant] >= at.view[0] && at.x[instant] <= at.view[1];

/** @param {Arranged} at @param {number} instant the middle of its column */
const middleOf = (at, instant) => {
  const wide = (at.right - at.left) / at.columns;
  return at.left + (Math.floor((at.xOf(at.x[instant]) - at.left) / wide) + 0.5) * wide;
};

/** @param {Pen} pen @param {Arranged} at @param {number} instant @param {Theme} theme @param {boolean} stays */
function drawCross(pen, at, instant, theme, stays) {
  if (!isInside(at, instant)) return;
  const x = middleOf(at, instant);
  path(pen, [
    [x, at.top],
    [x, at.bottom],
  ]);
  stroke(pen, theme.paper, 3);
  stroke(pen, theme.ink, 1);
  pen.beginPath();
  pen.arc(x, at.yOf(at.scene.timeline.total[instant]), 4, 0, 2 * Math.PI);
  stroke(pen, theme.paper, 3);
  fill(pen, theme.ink);
  path(
    pen,
    stays
      ? [
          [x, at.bottom - 1],
          [x - 5, at.bottom + 7],
          [x + 5, at.bottom + 7],
        ]
      : [],
  );
  fill(pen, theme.ink);
}

/** The caller's words in a box beside the line. @param {Pen} pen @param {Arranged} at @param {number} instant @param {Theme} theme */
function drawReading(pen, at, instant, theme) {
  const { title, lines } = at.scene.describe(instant);
  const { width, height } = at.size;
  const told = width < NARROW ? lines.slice(0, 1) : lines; // or it would cover the picture
  const rows = [title, ...told].map((line, number) => {
    const weight = number ? "normal" : "600";
    setFont(pen, theme, weight);
    const text = shortened(pen, line, width - 2 * PADDING - 8);
    return { text, weight, wide: pen.measureText(text).width };
  });
  const wide = Math.max(...rows.map((row) => row.wide)) + 2 * PADDING;
  const high = rows.length * LINE_HEIGHT + PADDING;
  const x = middleOf(at, instant);
  const left = clamped(
    x + 14 + wide <= width ? x + 12 : x - 12 - wide,
    2,
    Math.max(width - wide - 2, 2),
  );
  const top = clamped(at.top + 8, 2, Math.max(height - high - 2, 2));

  pen.beginPath();
  pen.roundRect(left + 0.5, top + 0.5, wide, high, 5);
  fill(pen, theme.paper);
  stroke(pen, theme.quiet, 1);
  rows.forEach(({ text, weight }, number) => {
    setFont(pen, theme, weight);
    write(pen, text, left + PADDING, top + PADDING / 2 + (number + 0.5) * LINE_HEIGHT, theme.ink);
  });
}

/** @param {Pen} pen @param {string} text @param {number} most pixels */
function shortened(pen, text, most) {
  let kept = text;
  while (kept.length > 1 && pen.measureText(kept).width > most) kept = `${kept.slice(0, -2)}…`;
  return kept;
}
