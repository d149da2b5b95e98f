/**
 * Memory against time: the runs on the table, and what is on screen.
 *
 * @typedef {import("./kernel.js").Source} Source
 * @typedef {import("./screen.js").Screen} Screen
 * @typedef {import("./runs_order.js").RunRow} RunRow
 * @typedef {{bytes: number, seconds: number, label: string, row: RunRow | null}} Dot
 */

import { NOTHING, compare } from "./compared.js";
import { scaleOf } from "./layout.js";
import { html } from "./vendor/preact.js";
import { useWidth } from "./width.js";
import { formatBytes, formatSeconds } from "./words.js";

const [WIDEST, HEIGHT] = [760, 230];
const [LEFT, RIGHT, TOP, BOTTOM] = [64, 20, 14, 34]; // margins

/** @param {{source: Source, screen: Screen, rows: RunRow[]}} props */
export function RunsChart({ source, screen, rows }) {
  const [root, width] = useWidth(WIDEST);
  const dots = dotsOf(screen, rows);
  if (rows.length === 0 || dots.length < 2) return html`<figure ref=${root}></figure>`;
  const bytes = scaleOf(Math.max(...dots.map((dot) => dot.bytes)), 0, 4);
  const longest = 1.15 * Math.max(...dots.map((dot) => dot.seconds));
  const xOf = (/** @type {number} */ seconds) =>
    LEFT + (seconds / longest) * (width - LEFT - RIGHT);
  const yOf = (/** @type {number} */ held) =>
    HEIGHT - BOTTOM - (held / bytes.top) * (HEIGHT - TOP - BOTTOM);
  const step = stepOf(longest / 5);
  const times = Array.from({ length: Math.floor(longest / step) + 1 }, (_, at) => at * step);
  const placed = dots.map((dot) => ({ ...dot, x: xOf(dot.seconds), y: yOf(dot.bytes) }));
  const places = labelled(placed, width - 4);
  return html`<figure class="ml-against" ref=${root}>
    <figcaption>Peak memory against the time of a step; click a dot to compare its run</figcaption>
    <svg width=${width} height=${HEIGHT} role="group" aria-label="Peak memory against time">
      ${bytes.ticks.map(
        (tick) =>
          html`<g class="ml-tick">
            <line x1=${LEFT} x2=${width - RIGHT} y1=${yOf(tick.bytes)} y2=${yOf(tick.bytes)} />
            <text x=${LEFT - 8} y=${yOf(tick.bytes) + 4} text-anchor="end">${tick.text}</text>
          </g>`,
      )}
      ${times.map(
        (seconds) =>
          html`<text class="ml-tick" x=${xOf(seconds)} y=${HEIGHT - 14} text-anchor="middle">
            ${seconds ? formatSeconds(seconds) : "0"}
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

/** 1, 2, 2.5 or 5 times a power of ten, at least so much. @param {number} least */
function stepOf(least) {
  const power = 10 ** Math.floor(Math.log10(least));
  const factors = [1, 2, 2.5, 5, 10];
  return power * /** @type {number} */ (factors.find((factor) => factor * power >= least));
}

/**
 * Labels beside their dots; where there is no room a label is left out, the oldest first.
 *
 * @param {(Dot & {x: number, y: number})[]} dots
 * @param {number} right edge
 */
function labelled(dots, right) {
  const taken = dots.map(({ x, y }) => ({ from: x - 7, to: x + 7, y }));
  return [...dots].reverse().map((dot) => {
    const wide = 6.8 * dot.label.length;
    const label = [
      { from: dot.x + 10, y: dot.y },
      { from: dot.x - 10 - wide, y: dot.y },
      { from: dot.x - wide / 2, y: dot.y - 16 },
      { from: dot.x - wide / 2, y: dot.y + 16 },
    ].find(({ from, y }) => {
      const isInside = from > LEFT && from + wide < right && y > 6;
      const isFree = (/** @type {typeof taken[number]} */ other) =>
        Math.abs(other.y - y) > 13 || from > other.to || from + wide < other.from;
      return isInside && taken.every(isFree);
    });
    if (label) taken.push({ from: label.from, to: label.from + wide, y: label.y });
    return { ...dot, place: label };
  });
}

/** @param {{source: Source, dot: ReturnType<typeof labelled>[number]}} props */
function DotMark({ source, dot: { row, x, y, label, bytes, seconds, place } }) {
  const words = `${label}: ${formatBytes(bytes)}, ${formatSeconds(seconds)} a step`;
  const act = () => row && compare(source, row.isCompared ? NOTHING : row.number);
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
    ${place && html`<text x=${place.from} y=${place.y + 4}>${label}</text>`}
  </g>`;
}
