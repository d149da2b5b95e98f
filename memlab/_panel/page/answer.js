/**
 * What is known of the settings on screen, always in one place: whether they fit, the peak, the
 * time; what went wrong; what to do.
 *
 * @typedef {import("./kernel.js").Source} Source
 * @typedef {import("./screen.js").Screen} Screen
 * @typedef {import("./screen.js").Found} Found
 */

import { LineText, Toggle } from "./controls.js";
import { html } from "./vendor/preact.js";
import { SYMBOLS, countedPeak } from "./verdict.js";
import { formatBytes, formatPercent, formatSeconds, plusMinus } from "./words.js";

const GONE = "The kernel was restarted or has died: run this cell again to get a working panel.";
const SILENT =
  "No answer from the kernel for 15 s. It may be busy with another cell; if it was restarted or " +
  "has died, run this cell again.";

/** @param {{source: Source, screen: Screen, panes: import("./panel.js").Panes}} props */
export function Answer({ source, screen, panes }) {
  const { fit, peak, limitBytes, costs, best, before, why } = screen;
  const share = peak && limitBytes ? peak.bytes / limitBytes : 0;
  const isPast = source.isLive && why !== "" && !source.isCurrent;
  return html`<section class="ml-answer" aria-label="Answer">
    <p
      class=${`ml-badge ml-${fit.kind}${isPast ? " ml-past" : ""}`}
      role="status"
      title=${fit.detail}
    >
      <span aria-hidden="true">${SYMBOLS[fit.kind]} </span>${fit.text}
    </p>
    <div
      class="ml-bar"
      role="img"
      aria-label=${share ? `${formatPercent(share)} of the limit` : "not known yet"}
    >
      <div
        class=${`ml-bar-part ml-${fit.kind}`}
        style=${{ width: `${Math.min(100 * share, 100)}%` }}
      ></div>
    </div>
    <p class="ml-costs">
      ${costs ? html`<span class="ml-told" title=${costs}>${costs}</span>` : best && html`<${Costs} ...${{ source, panes, found: best.found }} />`}
      ${!why && before && before.found !== best?.found && html`<${Before} found=${before.found} />`}
    </p>
  </section>`;
}

/** @param {{source: Source, panes: import("./panel.js").Panes, found: Found["found"]}} props */
function Costs({ source, panes, found }) {
  const { peak_allocated_bytes: ofPeak, step_seconds: ofTime } = found.uncertainty;
  const width = (/** @type {number} */ of) => html`<${Width} ...${{ source, panes, width: of }} />`;
  return html`<span>${formatBytes(found.peakBytes)} allocated${width(ofPeak)}</span>
    ${found.seconds !== null && html`<span>${formatSeconds(found.seconds)}${width(ofTime)} a step</span>`}`;
}

/** A half-width; a press shows measurements of real cards. @param {{source: Source, panes: import("./panel.js").Panes, width: number}} props */
function Width({ source, panes, width }) {
  const text = plusMinus(width);
  if (!text || !source.isLive) return text;
  return html`${" "}<${Toggle}
      name=${text.trim()}
      opens="evidence"
      about="the nearest measurements of real cards, beside what memlab predicts of them"
      controls=${`${source.id}-pane-evidence`}
      isOpen=${panes.isOpen("evidence")}
      onOpen=${(/** @type {boolean} */ isOpen) => panes.open("evidence", isOpen)}
    />`;
}

/** @param {{found: Found["found"]}} props */
function Before({ found }) {
  const { bytes, kind } = countedPeak(found);
  const time = found.seconds ? `, ${formatSeconds(found.seconds)}` : "";
  return html`<span class="ml-quiet">before: ${formatBytes(bytes)} ${kind}${time}</span>`;
}

/** What went wrong, said first. @param {{source: Source}} props */
export function Alerts({ source: { trouble, answer, isCurrent } }) {
  if (trouble) {
    return html`<div class="ml-failure" role="alert">${trouble === "gone" ? GONE : SILENT}</div>`;
  }
  const { failure } = answer;
  return (
    failure &&
    html`<div class=${`ml-failure${isCurrent ? "" : " ml-past"}`} role="alert">
      <b>${failure.title}</b>
      <p>${failure.sentence}</p>
    </div>`
  );
}

/** What is wrong with a typed limit; "8" is asked back as 8 GiB. @param {Screen["limit"]} limit @returns {import("./controls.js").Line | null} */
export function lineOf({ problem, meant }) {
  const remedy = meant ? { label: meant, fields: { memory_limit: meant } } : null;
  return problem ? { text: problem, kind: "warn", remedy } : null;
}

/** What is trained, or what is wrong with the row above, and what to do: a line each, which keeps its place. @param {{source: Source, screen: Screen}} props */
export const Advice = ({ source: { answer, store, isCurrent }, screen: { limit } }) =>
  html`<div class="ml-advice">
    ${[lineOf(limit) ?? answer.about, answer.advice].map(
      (line) =>
        html`<${LineText}
          line=${line}
          isPast=${!isCurrent && line !== null}
          onFields=${(/** @type {Record<string, any>} */ fields) => store.move(fields)}
        />`,
    )}
  </div>`;
