/**
 * The page of a recorded step: its sliders, whether it fits, and the picture of its memory. It
 * needs no kernel: everything is computed here.
 *
 * @typedef {import("./estimate.js").Estimate} Estimate
 * @typedef {import("./estimate.js").Setting} Setting
 * @typedef {import("./recorded_step.js").RecordedStep} Step
 * @typedef {import("./controls.js").Line} Line
 *
 * @typedef {object} Payload what Python writes into the page
 * @property {string} workload
 * @property {string} device as it is named to people
 * @property {number | null} usableBytes what a step can hold there
 * @property {string} limit as typed
 * @property {Setting} setting on screen when the page was made
 * @property {[string, string][]} fixed settings that have no slider here, with their values
 * @property {string} divided what micro-batches do to the gradient; "" if nothing
 * @property {string} code that makes this step
 * @property {string} made by which memlab
 * @property {string[]} steps step files in base64
 */

import { SliderRow, halfOctaves } from "./controls.js";
import { bestEstimate, planAt } from "./estimate.js";
import { Picture } from "./picture.js";
import { RecordedStep, microBatchSizes } from "./recorded_step.js";
import { readStepFile } from "./step_file.js";
import { Store, fromLink, toLink } from "./store.js";
import { html, render, useEffect, useMemo, useState } from "./vendor/preact.js";
import { SYMBOLS, countedPeak, fitVerdict } from "./verdict.js";
import {
  formatBytes,
  formatPercent,
  formatSeconds,
  parseLimit,
  plusMinus,
  splitText,
} from "./words.js";

const MOST_SAMPLES = 2 ** 20;
const LARGEST_BATCH = 1024; // of the slider; the box takes more
const LARGEST_ACCUMULATION = 64;
const BUDGETS = Array.from({ length: 21 }, (_, at) => (20 - at) / 20).reverse();
const NEEDS_KERNEL = "not known from this recording: ask memlab in a notebook";

/**
 * Shows a recorded step in an element.
 *
 * @param {HTMLElement} root
 * @param {Payload} payload
 * @param {{hash: string, setHash: (hash: string) => void}} [link] where settings are kept
 * @returns {Promise<() => void>} takes it away again
 */
export async function mount(root, payload, link) {
  const files = await Promise.all(payload.steps.map((text) => readStepFile(fromBase64(text))));
  const steps = files.map((file) => new RecordedStep(file));
  const store = new Store(
    fromLink(link?.hash ?? "", {
      setting: payload.setting,
      limit: payload.limit,
      view: "category",
      instant: null,
      module: null,
    }),
  );
  if (link) store.subscribe(() => link.setHash(toLink(store.state)));
  root.replaceChildren();
  render(html`<${App} payload=${payload} steps=${steps} store=${store} />`, root);
  return () => render(null, root);
}

/** @param {string} text */
const fromBase64 = (text) => Uint8Array.from(atob(text), (letter) => letter.charCodeAt(0));

/** @param {{payload: Payload, steps: Step[], store: Store}} props */
function App({ payload, steps, store }) {
  const [, redraw] = useState(0);
  useEffect(() => store.subscribe(() => redraw((count) => count + 1)), [store]);
  const { setting, limit: typed } = store.state;
  const limit = parseLimit(typed);
  const limitBytes = limit.bytes ?? payload.usableBytes;
  const key = JSON.stringify(setting);
  const problem = problemOf(setting, steps[0].header.data_parallel_size);
  const best = useMemo(
    () => (problem ? null : bestEstimate(steps, setting)),
    [steps, key, problem],
  );
  // what a link asks for may not be known; then the setting that was saved is shown, dimmed
  const [shown, setShown] = useState(() => best ?? bestEstimate(steps, payload.setting));
  if (best && best !== shown) setShown(best);
  const before = useMemo(
    () => (store.before ? bestEstimate(steps, store.before) : null),
    [steps, JSON.stringify(store.before)],
  );
  const current = best ?? shown;
  const why = problem || (best ? "" : NEEDS_KERNEL);

  return html`<article
    class="ml"
    onKeyDown=${(/** @type {KeyboardEvent} */ e) => onShortcut(e, store)}
  >
    <${Head} payload=${payload} store=${store} limit=${limit} />
    ${current && html`<${Answer} ...${{ ...current, limitBytes, payload, why, before }} />`}
    <div class="ml-body">
      <${Controls} ...${{ store, steps, payload, best, problem, why }} />
      ${current && html`<${Picture} ...${{ store, ...current, limitBytes, why, before }} />`}
    </div>
    <${Foot} payload=${payload} />
  </article>`;
}

/** Why a setting cannot be; "" if it can. @param {Setting} setting @param {number} ranks */
function problemOf({ batchSize, accumulationSteps }, ranks) {
  if (batchSize % ranks) return `${ranks} ranks cannot divide ${batchSize} samples equally`;
  if (accumulationSteps > LARGEST_ACCUMULATION) {
    return `this page computes at most ${LARGEST_ACCUMULATION} micro-batches`;
  }
  if (batchSize / ranks < accumulationSteps) {
    return `${accumulationSteps} micro-batches need at least ${accumulationSteps * ranks} samples`;
  }
  return "";
}

/** @param {KeyboardEvent} event @param {Store} store */
function onShortcut(event, store) {
  const isUndo = (event.ctrlKey || event.metaKey) && event.key.toLowerCase() === "z";
  const isInBox = event.target instanceof HTMLInputElement && event.target.type === "text";
  if (!isUndo || isInBox) return;
  event.preventDefault();
  if (event.shiftKey) store.redo();
  else store.undo();
}

/** @param {{payload: Payload, store: Store, limit: ReturnType<typeof parseLimit>}} props */
function Head({ payload, store, limit }) {
  const placeholder = payload.usableBytes ? formatBytes(payload.usableBytes) : "none";
  return html`<header class="ml-head">
    <h2>${payload.workload}</h2>
    <span>on ${payload.device}</span>
    <label>
      limit
      <input
        class="ml-box"
        type="text"
        value=${store.state.limit}
        placeholder=${placeholder}
        aria-invalid=${Boolean(limit.problem)}
        title=${`what a step may hold, such as "7.5 GiB"; empty is what the device has`}
        onInput=${(/** @type {Event} */ e) =>
          store.setLimit(/** @type {HTMLInputElement} */ (e.target).value)}
      />
    </label>
    ${
      limit.problem &&
      html`<span class="ml-warn" role="alert"
        >${limit.problem}
        ${
          limit.meant &&
          html`<button type="button" onClick=${() => store.setLimit(limit.meant)}>
            ${limit.meant}
          </button>`
        }
      </span>`
    }
    <span class="ml-tools">
      <button type="button" disabled=${!store.past.length} onClick=${() => store.undo()}>
        Undo
      </button>
      <button type="button" disabled=${!store.future.length} onClick=${() => store.redo()}>
        Redo
      </button>
    </span>
  </header>`;
}

/**
 * The row of the answer: whether it fits, the peak, the time; always in one place.
 *
 * @param {{step: Step, found: Estimate, limitBytes: number | null, payload: Payload, why: string,
 *     before: {step: Step, found: Estimate} | null}} props
 */
function Answer({ step, found, limitBytes, payload, why, before }) {
  const verdict = useMemo(
    () => fitVerdict(step, found, limitBytes, payload.device),
    [step, found, limitBytes],
  );
  const peak = countedPeak(found);
  const share = limitBytes ? peak.bytes / limitBytes : 0;
  const was = !why && before && before.found !== found ? countedPeak(before.found) : null;
  const kind = why ? "open" : verdict.kind;
  return html`<section class="ml-answer" aria-label="Answer">
    <p class=${`ml-badge ml-${kind}`} role="status" title=${verdict.detail}>
      <span aria-hidden="true">${SYMBOLS[kind]} </span>${why || verdict.text}
    </p>
    <div class="ml-bar" role="img" aria-label=${`${formatPercent(share)} of the limit`}>
      <div
        class=${`ml-bar-part ml-${kind}`}
        style=${{ width: `${Math.min(100 * share, 100)}%` }}
      ></div>
    </div>
    <p class="ml-costs">
      ${`${formatBytes(found.peakBytes)} allocated${plusMinus(found.uncertainty.peak_allocated_bytes)}`}
      ${
        found.seconds !== null &&
        html`<span
          >${formatSeconds(found.seconds)}${plusMinus(found.uncertainty.step_seconds)} a step</span
        >`
      }
      ${
        was &&
        html`<span class="ml-quiet"
          >before: ${formatBytes(was.bytes)}
          ${was.kind}${
            before?.found.seconds ? `, ${formatSeconds(before.found.seconds)}` : ""
          }</span
        >`
      }
    </p>
  </section>`;
}

/**
 * @param {{store: Store, steps: Step[], payload: Payload, best: {step: Step, found: Estimate} | null,
 *     problem: string, why: string}} props
 */
function Controls({ store, steps, payload, best, problem, why }) {
  const { setting } = store.state;
  const ranks = steps[0].header.data_parallel_size;
  const batches = halfOctaves(LARGEST_BATCH / ranks).map((size) => size * ranks);
  const counts = halfOctaves(LARGEST_ACCUMULATION);
  /** @param {string} text */
  const wholeNumber = (text) => {
    const number = Number(text.replace(/[\s,]/g, ""));
    return Number.isInteger(number) && number >= 1 && number <= MOST_SAMPLES ? number : null;
  };
  /** @param {string} text */
  const share = (text) => {
    const number = Number(text.replace("%", "").replace(",", ".")) / (text.includes("%") ? 100 : 1);
    return text.trim() && number >= 0 && number <= 1 ? number : null;
  };
  return html`<form class="ml-controls" onSubmit=${(/** @type {Event} */ e) => e.preventDefault()}>
    <${SliderRow}
      id="ml-batch"
      label="Batch size"
      values=${batches}
      value=${setting.batchSize}
      inWords=${(/** @type {number} */ value) => value.toLocaleString("en-US")}
      parse=${wholeNumber}
      allowed="a whole number from 1"
      pageStep=${4}
      onValue=${(/** @type {number} */ batchSize) => store.move({ batchSize })}
      line=${batchLine(setting, problem, why)}
    />
    <${SliderRow}
      id="ml-accumulation"
      label="Accumulation"
      values=${counts}
      value=${setting.accumulationSteps}
      inWords=${String}
      parse=${wholeNumber}
      allowed="a whole number from 1"
      pageStep=${4}
      onValue=${(/** @type {number} */ accumulationSteps) => store.move({ accumulationSteps })}
      line=${accumulationLine(setting, ranks, payload.divided, problem, store)}
    />
    <${SliderRow}
      id="ml-budget"
      label="Memory budget"
      values=${BUDGETS}
      value=${setting.memoryBudget}
      inWords=${(/** @type {number} */ value) => `${Math.round(100 * value)} %`}
      parse=${share}
      allowed="a share of the activations from 0 to 1, or 40 %"
      pageStep=${4}
      onValue=${(/** @type {number} */ memoryBudget) => store.move({ memoryBudget })}
      line=${budgetLine(setting, steps, best)}
    />
    ${
      payload.fixed.length > 0 &&
      html`<dl class="ml-fixed">
        ${payload.fixed.map(
          ([label, value]) =>
            html`<div>
              <dt>${label}</dt>
              <dd>${value}</dd>
            </div>`,
        )}
        <p class="ml-quiet">
          These are as they were recorded; a notebook with memlab changes them.
        </p>
      </dl>`
    }
  </form>`;
}

/** @param {Setting} setting @param {string} problem @param {string} why @returns {Line} */
function batchLine({ batchSize }, problem, why) {
  if (problem && problem.includes("ranks")) return { text: problem, kind: "bad" };
  if (why && !problem) return { text: why, kind: "warn" };
  return { text: `${batchSize.toLocaleString("en-US")} samples in each optimizer update` };
}

/** @param {Setting} setting @param {number} ranks @param {string} divided @param {string} problem @param {Store} store @returns {Line} */
function accumulationLine({ batchSize, accumulationSteps }, ranks, divided, problem, store) {
  if (problem) {
    const most = Math.min(Math.max(Math.floor(batchSize / ranks), 1), LARGEST_ACCUMULATION);
    const use = () => store.move({ accumulationSteps: most });
    return { text: problem, kind: "bad", remedy: { label: `use ${most}`, use } };
  }
  const text = splitText(microBatchSizes(batchSize / ranks, accumulationSteps));
  if (accumulationSteps * ranks === 1) return { text: `${text}; gradient: unchanged` };
  return divided
    ? { text: `${text}; ${divided}`, kind: "warn" }
    : { text: `${text}; gradient: unchanged` };
}

/** @param {Setting} setting @param {Step[]} steps @param {{step: Step, found: Estimate} | null} best @returns {Line} */
function budgetLine({ memoryBudget }, steps, best) {
  const known = best?.step ?? steps[0];
  if (memoryBudget >= 1)
    return { text: "keeps every activation for backward; nothing is recomputed" };
  const plan = planAt(known, memoryBudget);
  const plain = planAt(known, 1);
  if (!plan || !plain)
    return { text: `keeps at most ${formatPercent(memoryBudget)} of the activations` };
  const seconds = best?.found.seconds;
  const more = plan.recompute_seconds;
  const costs =
    seconds && more
      ? `; costs ${formatPercent(more / Math.max(seconds - more, 1e-9))} more time`
      : "";
  return { text: `${plan.note.replace(/\.$/, "")}${costs}` };
}

/** @param {{payload: Payload}} props */
function Foot({ payload }) {
  return html`<footer class="ml-foot">
    <details>
      <summary>this step as code</summary>
      <pre>${payload.code}</pre>
    </details>
    <p class="ml-quiet">${payload.made}: a recorded step, computed in this page; no kernel runs.</p>
  </footer>`;
}
