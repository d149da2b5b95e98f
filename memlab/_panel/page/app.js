/**
 * The page of a recorded step: its sliders, whether it fits, and the picture of its memory; or of one
 * result, where nothing moves but the limit. It needs no kernel: everything is computed here.
 *
 * @typedef {import("./estimate.js").Setting} Setting
 * @typedef {import("./recorded_step.js").RecordedStep} Step
 * @typedef {import("./kernel.js").Source} Source
 *
 * @typedef {object} Payload what Python writes into the page
 * @property {string} workload
 * @property {string} device as it is named to people
 * @property {string} where such as "measured on cpu"
 * @property {number | null} usableBytes what a step can hold there
 * @property {string} limit as typed
 * @property {Setting} setting on screen when the page was made
 * @property {import("./kernel.js").ControlOf[]} controls the sliders
 * @property {[string, string][]} fixed settings that have no slider here, with their values
 * @property {string} divided what micro-batches do to the gradient; "" if nothing
 * @property {string} code that makes this step
 * @property {string} made by which memlab, and what the page is
 * @property {string[]} steps step files in base64, or the file of one result
 * @property {{fit: import("./verdict.js").Verdict, failure: {title: string, sentence: string} | null,
 *     notes: string[]} | null} told of a result; the text of `fit` is "" where the page can judge
 * @property {import("./runs_order.js").Runs | null} runs the table of runs
 * @property {number[]} comparable runs that the steps tell of
 */

import { bestEstimate } from "./estimate.js";
import { heldBy } from "./measured.js";
import { Panel } from "./panel.js";
import { RecordedStep } from "./recorded_step.js";
import { readStepFile } from "./step_file.js";
import { AT_FIRST, Store, fromLink, toLink } from "./store.js";
import { html, render } from "./vendor/preact.js";

const REST_MS = 200;
const NOTHING = "no memory was measured or predicted, so there is nothing to draw";

/**
 * Shows a recorded step, or a result, in an element.
 *
 * @param {HTMLElement} root
 * @param {Payload} payload
 * @param {{hash: string, setHash: (hash: string) => void}} [link] where settings are kept
 * @returns {Promise<() => void>} takes it away again
 */
export async function mount(root, payload, link) {
  const files = await Promise.all(payload.steps.map((text) => readStepFile(fromBase64(text))));
  const steps = payload.told ? [] : files.map((file) => new RecordedStep(file));
  const held = payload.told ? heldBy(files[0]) : null;
  const source = sourceOf(root.id || "ml", payload, steps, held, link?.hash ?? "");
  /** @type {ReturnType<typeof setTimeout> | undefined} */
  let rest; // a browser allows few changes of the address in a second
  const keep = () => link?.setHash(toLink(source.store.state));
  if (link)
    source.store.subscribe(() => {
      clearTimeout(rest);
      rest = setTimeout(keep, REST_MS);
    });
  root.replaceChildren();
  render(html`<${Panel} source=${source}><${Foot} payload=${payload} /><//>`, root);
  return () => render(null, root);
}

/** @type {Step[]} */
const NO_STEPS = [];

/** @param {string} text */
const fromBase64 = (text) => Uint8Array.from(atob(text), (letter) => letter.charCodeAt(0));

/** A saved page as a source: nothing that needs a kernel. @param {string} id @param {Payload} payload @param {Step[]} steps @param {import("./estimate.js").Estimate | null} held by a result @param {string} hash @returns {Source} */
function sourceOf(id, payload, steps, held, hash) {
  const { told } = payload;
  const { batchSize, accumulationSteps, memoryBudget } = payload.setting;
  const fields = {
    ...{
      batch_size: batchSize,
      accumulation_steps: accumulationSteps,
      memory_budget: memoryBudget,
    },
    memory_limit: payload.limit,
  };
  const state = fromLink(hash, { ...AT_FIRST, fields });
  const { memory_limit } = state.fields;
  const store = new Store(told ? { ...state, fields: { ...fields, memory_limit } } : state);
  /** @type {any} what only a kernel says */
  const nothing = { lines: {}, fit: { text: "" }, source: "none", note: "", run: null };
  const ofResult = told && { ...told, source: "run", note: NOTHING, run: 1 };
  /** @type {Source} */
  const source = {
    ...{ isLive: false, id, store, trouble: "", panes: {} },
    get isCurrent() {
      return !told || store.state.fields.memory_limit === payload.limit;
    },
    runs: payload.runs,
    catalog: {
      ...{ version: "", workloads: [], devices: [], tooltips: {}, help: null },
      controls: told ? [] : payload.controls,
    },
    form: {
      ...{ size: null, choices: [], precisions: [], disabled: [], base: null, own: {} },
      ...{ moreLabel: "", ranksLabel: "" },
    },
    answer: {
      ...nothing,
      ...ofResult,
      ...{ workload: payload.workload, device: payload.device, where: payload.where },
      divided: payload.divided,
      usableBytes: payload.usableBytes,
      usableWords: 'what a step may hold, such as "7.5 GiB"; empty is what the device has',
    },
    job: { running: false, byCell: "", text: "", fraction: null },
    fixed: payload.fixed,
    // what a link asks for may not be known; then the setting that was saved is shown, dimmed
    first: bestEstimate(steps, payload.setting),
    stepsFor: () => steps,
    stepsOf: ({ number }) => (payload.comparable.includes(number) ? steps : NO_STEPS),
    measured: () => null,
    ran: () => held,
    subscribe: (listener) => store.subscribe(listener),
    tell: ({ type, run }) => {
      if (type !== "compare" || !source.runs) return;
      const compared = payload.comparable.includes(run) ? run : null;
      const rows = source.runs.rows.map((row) => ({ ...row, isCompared: row.number === compared }));
      source.runs = { ...source.runs, rows };
      store.look({});
    },
    askCsv: () => {},
  };
  return source;
}

/** @param {{payload: Payload}} props */
function Foot({ payload }) {
  return html`<footer class="ml-foot">
    ${payload.told?.notes.map((note) => html`<p>${note}</p>`)}
    <details>
      <summary>this step as code</summary>
      <pre>${payload.code}</pre>
    </details>
    <p class="ml-quiet">${payload.made}</p>
  </footer>`;
}
