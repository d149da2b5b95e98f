/**
 * What the page itself knows of the three settings that it computes with: whether they can be, and
 * the lines beside them.
 *
 * @typedef {import("./estimate.js").Setting} Setting
 * @typedef {import("./estimate.js").Estimate} Estimate
 * @typedef {import("./recorded_step.js").RecordedStep} Step
 * @typedef {import("./controls.js").Line} Line
 * @typedef {import("./store.js").Fields} Fields
 */

import { planAt } from "./estimate.js";
import { microBatchSizes } from "./recorded_step.js";
import { formatPercent, splitText } from "./words.js";

export const MOST_MICRO_BATCHES = 64; // that the page computes
const MOST_SAMPLES = 1e9; // as in `memlab/config.py`
const OPEN = /** @type {const} */ ("open");
const NOT_OF_STEP = ["memory_limit", "check_gradients"];
/** What an estimate moves, or does not depend on. */
const NOT_OF_FAMILY = ["batch_size", "accumulation_steps", "memory_budget", ...NOT_OF_STEP];

/** @param {Fields} fields @param {string[]} names */
const without = (fields, names) =>
  textOf(Object.fromEntries(Object.entries(fields).filter(([name]) => !names.includes(name))));

/** All that estimates take as given, as text. @param {Fields} fields */
export const familyKey = (fields) => without(fields, NOT_OF_FAMILY);

/** All that makes a step what it is, as text. @param {Fields} fields */
export const stepKey = (fields) => without(fields, NOT_OF_STEP);

/** Settings as text that is the same for the same settings. @param {Fields} fields */
export const textOf = (fields) => JSON.stringify(Object.entries(fields).sort());

/** What sliders move; null while one of these is no number. @param {Fields} fields @returns {Setting | null} */
export function settingOf({ batch_size, accumulation_steps, memory_budget }) {
  const isCount = (/** @type {any} */ value) =>
    Number.isInteger(value) && value >= 1 && value <= MOST_SAMPLES;
  const isShare = typeof memory_budget === "number" && memory_budget >= 0 && memory_budget <= 1;
  if (!isCount(batch_size) || !isCount(accumulation_steps) || !isShare) return null;
  return {
    batchSize: batch_size,
    accumulationSteps: accumulation_steps,
    memoryBudget: memory_budget,
  };
}

/** @param {string} text of a number box @returns {number | null} null if it is not allowed */
export function wholeNumber(text) {
  // "1,00" may mean 1 or 100
  const isNumber = /^\s*(\d+|[1-9]\d{0,2}([\s,])\d{3}(\2\d{3})*)\s*$/.test(text);
  const number = Number(text.replace(/[\s,]/g, ""));
  return isNumber && number >= 1 && number <= MOST_SAMPLES ? number : null;
}

/** @param {string} text of a number box @returns {number | null} null if it is not allowed */
export function share(text) {
  const number = Number(text.replace("%", "").replace(",", ".")) / (text.includes("%") ? 100 : 1);
  return text.trim() && number >= 0 && number <= 1 ? number : null;
}

/** Why a setting cannot be; "" if it can. @param {Setting} setting @param {number} ranks */
export function problemOf({ batchSize, accumulationSteps }, ranks) {
  if (batchSize % ranks) return `${ranks} ranks cannot divide ${batchSize} samples equally`;
  if (batchSize / ranks < accumulationSteps) {
    return `${accumulationSteps} micro-batches need at least ${accumulationSteps * ranks} samples`;
  }
  return "";
}

/**
 * The lines beside the three settings.
 *
 * @param {object} known
 * @param {Setting} known.setting
 * @param {Step[]} known.steps
 * @param {import("./screen.js").Found | null} known.best
 * @param {string} known.problem with the setting; "" for none
 * @param {string} known.unknown why there is no estimate of it; "" if there is one
 * @param {string} known.divided what micro-batches do to the gradient; "" if nothing
 * @returns {Record<string, Line>} by field
 */
export function ownLines({ setting, steps, best, problem, unknown, divided }) {
  const ranks = steps[0]?.header.data_parallel_size ?? 1;
  return {
    batch_size: batchLine(setting, problem, unknown),
    accumulation_steps: accumulationLine(setting, ranks, divided, problem),
    memory_budget: budgetLine(setting, best?.step ?? steps[0], best),
  };
}

/** @param {Setting} setting @param {string} problem @param {string} unknown @returns {Line} */
function batchLine({ batchSize }, problem, unknown) {
  if (problem.includes("ranks")) return { text: problem, kind: "bad" };
  if (unknown && !problem) return { text: unknown, kind: "warn" };
  return {
    text: `${batchSize.toLocaleString("en-US")} samples in each optimizer update`,
    kind: OPEN,
  };
}

/** @param {Setting} setting @param {number} ranks @param {string} divided @param {string} problem @returns {Line} */
function accumulationLine({ batchSize, accumulationSteps }, ranks, divided, problem) {
  if (problem) {
    const most = Math.min(Math.max(Math.floor(batchSize / ranks), 1), MOST_MICRO_BATCHES);
    const remedy = { label: `use ${most}`, fields: { accumulation_steps: most } };
    return { text: problem, kind: "bad", remedy };
  }
  // of more no list is made; the kernel says what they are
  const text =
    accumulationSteps > MOST_MICRO_BATCHES
      ? `${accumulationSteps.toLocaleString("en-US")} micro-batches`
      : splitText(microBatchSizes(batchSize / ranks, accumulationSteps));
  const isChanged = divided && accumulationSteps * ranks > 1;
  if (isChanged) return { text: `${text}; ${divided}`, kind: "warn" };
  return { text, kind: OPEN, verdict: { kind: "good", text: "gradient: unchanged", detail: "" } };
}

/** @param {Setting} setting @param {Step | undefined} step @param {{found: Estimate} | null} best @returns {Line} */
function budgetLine({ memoryBudget }, step, best) {
  if (memoryBudget >= 1) {
    return { text: "keeps every activation for backward; nothing is recomputed", kind: OPEN };
  }
  const plan = step && planAt(step, memoryBudget);
  if (!plan) {
    return { text: `keeps at most ${formatPercent(memoryBudget)} of the activations`, kind: OPEN };
  }
  const seconds = best?.found.seconds;
  const more = plan.recompute_seconds;
  let costs = "";
  if (seconds && more) {
    costs = `; costs ${formatPercent(more / Math.max(seconds - more, 1e-9))} more time`;
  }
  return { text: `${plan.note.replace(/\.$/, "")}${costs}`, kind: OPEN };
}
