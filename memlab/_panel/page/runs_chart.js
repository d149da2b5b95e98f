/**
 * Memory against time: the runs on the table, and what is on screen.
 *
 * @typedef {import("./kernel.js").Source} Source
 * @typedef {import("./screen.js").Screen} Screen
 * @typedef {import("./runs_order.js").RunRow} RunRow
 * @typedef {{bytes: number, seconds: number, label: string, row: RunRow | null}} Dot
 */

import { scaleOf } from "./layout.js";
import { compare } from "./runs_order.js";
import { html } from "./vendor/preact.js";
import { formatBytes, formatSeconds } from "./words.js";

const [WIDTH, HEIGHT] = [560, 220];
const [LEFT, RIGHT, TOP, BOTTOM] = [64, 20, 14, 34]; // margins

/** @param {{source: Source, screen: Screen, rows: RunRow[]}} props */
export function RunsChart({ source, screen, rows }) {
  const dots = dotsOf(screen, rows);
  if (rows.length === 0 || dots.length < 2) return null;
  const bytes = scaleOf(Math.max(...dots.map((dot) => dot.bytes)), 0, 4);
  const longest = 1.15 * Math.max(...dots.map((dot) => dot.seconds));
  const xOf = (/** @type {number} */ seconds) =>
    LEFT + (seconds / longest) * (WIDTH - LEFT - RIGHT);
  const yOf = (/** @type {number} */ held) =>
    HEIGHT - BOTTOM - (held / bytes.top) * (HEIGHT - TOP - BOTTOM);
  const step = stepOf(longest / 4);
  const times = Array.from({ length: Math.floor(longest / step) }, (_, at) => (at + 1) * step);
  const places = labelled(dots.map((dot) => ({ ...dot, x: xOf(dot.seconds), y: yOf(dot.bytes) })));
  return html`<figure class="ml-against">
    <figcaption>Peak memory against the time of a step; click a dot to compare its run</figcaption>
    <svg viewBox=${`0 0 ${WIDTH} ${HEIGHT}`} role="group" aria-label="Peak memory against time">
      ${bytes.ticks.map(
        (tick) =>
          html`<g class="ml-tick">
            <line x1=${LEFT} x2=${WIDTH - RIGHT} y1=${yOf(tick.bytes)} y2=${yOf(tick.bytes)} />
            <text x=${LEFT - 8} y=${yOf(tick.bytes) + 4} text-anchor="end">${tick.text}</text>
          </g>`,
      )}
      ${times.map(
        (seconds) =>
          html`<text class="ml-tick" x=${xOf(seconds)} y=${HEIGHT - 14} text-anchor="middle">
            ${formatSeconds(seconds)}
          </text>`,
      )}
      ${places.map((dot) => html`<${DotMark} ...${{ source, dot }} />`)}
    </svg>
  </figure>`;
}

/** @param {Screen} screen @param {RunRow[]} rows @returns {Dot[]} */
function dotsOf({ best, why, peak }, rows) {
  /** @type {Dot[]} */
  const dots = rows.flatMap((row) =>
    row.peakBytes && row.seconds
      ? [{ bytes: row.peakBytes, seconds: row.seconds, label: row.label, row }]
      : [],
  );
  const seconds = best?.found.seconds;
  if (!why && peak && seconds) {
    dots.push({ bytes: peak.bytes, seconds, label: "on screen", row: null });
  }
  return dots;
}

/** 1, 2 or 5 times a power of ten, at least so much. @param {number} least */
function stepOf(least) {
  const power = 10 ** Math.floor(Math.log10(least));
  return power * /** @type {number} */ ([1, 2, 5, 10].find((factor) => factor * power >= least));
}

/**
 * Labels beside their dots; where there is no room a label is left out, the oldest first.
 *
 * @param {(Dot & {x: number, y: number})[]} dots
 */
function labelled(dots) {
  const taken = dots.map(({ x, y }) => ({ from: x - 7, to: x + 7, y }));
  return [...dots].reverse().map((dot) => {
    const wide = 6.6 * dot.label.length;
    const isFree = (/** @type {number} */ from) =>
      from > LEFT &&
      from + wide < WIDTH &&
      taken.every(
        (other) => Math.abs(other.y - dot.y) > 13 || from > other.to || from + wide < other.from,
      );
    const isRight = isFree(dot.x + 9);
    const isNamed = isRight || isFree(dot.x - 9 - wide);
    const from = isRight ? dot.x + 9 : dot.x - 9 - wide;
    if (isNamed) taken.push({ from, to: from + wide, y: dot.y });
    return { ...dot, isRight, isNamed };
  });
}

/** @param {{source: Source, dot: ReturnType<typeof labelled>[number]}} props */
function DotMark({ source, dot: { row, x, y, label, bytes, seconds, isRight, isNamed } }) {
  const words = `${label}: ${formatBytes(bytes)}, ${formatSeconds(seconds)} a step`;
  const act = () => row && compare(source, row);
  const button = row && {
    ...{ role: "button", tabindex: "0", "aria-label": words, "aria-pressed": row.isCompared },
    onClick: act,
    onKeyDown: (/** @type {KeyboardEvent} */ event) => {
      if (event.key !== "Enter" && event.key !== " ") return;
      event.preventDefault();
      act();
    },
  };
  const kind = row ? (row.isPredicted ? "predicted" : "measured") : "now";
  return html`<g class=${`ml-dot ml-dot-${kind}`} ...${button ?? {}}>
    <title>${words}</title>
    <circle cx=${x} cy=${y} r="12" class="ml-dot-target" />
    <circle cx=${x} cy=${y} r=${row?.isCompared ? 7 : 5} />
    ${
      isNamed &&
      html`<text x=${isRight ? x + 10 : x - 10} y=${y + 4} text-anchor=${isRight ? "start" : "end"}>
        ${label}
      </text>`
    }
  </g>`;
}
