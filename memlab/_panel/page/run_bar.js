/**
 * Run or keep, stop, and what goes on.
 *
 * @typedef {import("./kernel.js").Source} Source
 * @typedef {import("./screen.js").Screen} Screen
 */

import { Button, Switch } from "./controls.js";
import { html } from "./vendor/preact.js";
import { SYMBOLS } from "./verdict.js";

/** Whether Run can be pressed; while the kernel has not answered yet, as far as the page knows. @param {Source} source @param {Screen} screen */
export const canRun = ({ job, answer, isCurrent, trouble }, { problem }) =>
  !job.running && trouble !== "gone" && (isCurrent ? answer.ready : !problem);

/** @param {{source: Source, screen: Screen}} props */
export function RunBar({ source, screen }) {
  const { answer, job, store, catalog } = source;
  const { kind, text, isPast } = answer.status;
  return html`<section class="ml-run" aria-label="Run">
    <div class="ml-run-buttons">
      <${Button}
        name=${answer.keeps ? "Keep this prediction" : "Run"}
        kind="ml-primary"
        about=${answer.why}
        disabled=${!canRun(source, screen)}
        onPress=${() => source.tell({ type: "run" })}
      />
      <${Button}
        name="Stop"
        about=${job.byCell || "Escape does this too"}
        disabled=${!job.running || job.byCell !== ""}
        onPress=${() => source.tell({ type: "stop" })}
      />
      <${Switch}
        label="check gradients"
        about=${catalog.tooltips.check_gradients}
        value=${Boolean(store.state.fields.check_gradients)}
        onValue=${(/** @type {boolean} */ check_gradients) => store.move({ check_gradients })}
      />
    </div>
    <div class="ml-progress">
      ${
        job.running &&
        html`<progress max="1" value=${job.fraction ?? undefined} aria-label="Progress"></progress>
          <span title=${job.text}>${job.text}</span>`
      }
      ${!job.running && source.trouble !== "gone" && answer.doing && html`<span title=${answer.doing}>${answer.doing}</span>`}
    </div>
    <p
      class=${`ml-status ml-${kind || "open"}${isPast || screen.isPast ? " ml-past" : ""}`}
      role="status"
      title=${text}
    >
      ${kind && html`<span aria-hidden="true">${SYMBOLS[/** @type {"good"} */ (kind)]} </span>`}${text}
    </p>
    ${answer.printed && html`<${Printed} ...${answer.printed} />`}
  </section>`;
}

/** @param {{when: string, text: string}} props */
const Printed = ({ when, text }) =>
  html`<details class="ml-printed">
    <summary>${when}</summary>
    <pre tabindex="0">${text}</pre>
  </details>`;
