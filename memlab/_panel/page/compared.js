/**
 * Before and after: what the step on screen is compared with, and what makes the difference.
 *
 * @typedef {import("./kernel.js").Source} Source
 * @typedef {import("./runs_order.js").RunRow} RunRow
 * @typedef {import("./screen.js").Found} Found
 * @typedef {import("./screen.js").Screen} Screen
 * @typedef {import("./estimate.js").Estimate} Estimate
 *
 * @typedef {object} Compared
 * @property {string} name
 * @property {string} about its settings, in words
 * @property {Found} found what is drawn of it
 * @property {Estimate | null} measured what it held, if that was measured
 * @property {boolean} isOfModel whether it is of the workload on screen
 */

import { bestEstimate } from "./estimate.js";
import { BlockModules } from "./modules.js";
import { CATEGORIES } from "./recorded_step.js";
import { useMemo } from "./vendor/preact.js";
import { formatBytes, formatSeconds } from "./words.js";

export const NOTHING = 0;
const BEFORE = "before";
const LAST_MOVE = "before the last move";
const LEAST_SHARE = 0.05; // of the largest difference; a smaller one is not told
const MOST_TOLD = 4;

/** What can be chosen, and what is: nothing where nothing moves. @param {Source} source */
export function choicesOf(source) {
  if (!source.catalog.controls.length) return { choices: [], value: NOTHING };
  const { isLive, runs, store } = source;
  const rows = (runs?.rows ?? []).filter((row) => row.peakBytes);
  const known = rows.filter((row) => isLive || source.stepsOf(row).length).reverse();
  const choices = [
    { value: NOTHING, label: "nothing" },
    { value: BEFORE, label: LAST_MOVE },
    ...known.map((row) => ({ value: row.number, label: `${row.label}: ${row.settings}` })),
  ];
  const run = known.find(({ isCompared }) => isCompared)?.number ?? NOTHING;
  return { choices, value: store.state.isWithBefore ? BEFORE : run };
}

/** Compares with something else from now on. @param {Source} source @param {number | string} value */
export function compare(source, value) {
  source.store.look({ isWithBefore: value === BEFORE });
  const run = typeof value === "number" ? value : NOTHING;
  if (run || source.runs?.rows.some((row) => row.isCompared)) source.tell({ type: "compare", run });
}

/** What the picture is compared with; null for nothing. @param {Source} source @param {Screen} screen @returns {Compared | null} */
export function useCompared(source, { before }) {
  const { runs, store } = source;
  const { workload, device, run } = source.answer;
  const { isWithBefore } = store.state;
  const row = runs?.rows.find(({ isCompared }) => isCompared);
  const steps = row ? source.stepsOf(row) : null;
  const held = row ? source.measured(row.number) : null;
  const isOfModel = isWithBefore
    ? (store.before?.workload ?? store.state.fields.workload) === store.state.fields.workload
    : row?.workload === workload;
  return useMemo(() => {
    if (isWithBefore) {
      if (!before) return null;
      const about = settingWords(before.found.setting);
      return { name: LAST_MOVE, about, found: before, measured: null, isOfModel };
    }
    if (!row || !steps) return null;
    const predicted = bestEstimate(steps, row.setting);
    if (!predicted && row.number === run) return null; // it is on screen
    const found = predicted ?? (held?.timeline.total.length ? { step: null, found: held } : null);
    if (!found) return null;
    const measured = row.isPredicted ? null : held;
    const { how } = found.found;
    const isSaid = how !== "predicted" || (!measured && !row.isPredicted);
    const about = [
      !isOfModel && row.workload,
      row.settings,
      row.device !== device && `on ${row.device}`,
      isSaid && how,
    ];
    return { name: row.label, about: about.filter(Boolean).join(", "), found, measured, isOfModel };
  }, [isWithBefore, before, row?.number, row?.label, steps, held, run, device, isOfModel]);
}

/** What is on the sliders, as the kernel words it of a run. @param {import("./estimate.js").Setting} setting */
export function settingWords({ batchSize, accumulationSteps, memoryBudget }) {
  const words = [`batch ${batchSize}`];
  if (accumulationSteps > 1) words.push(`accumulation ${accumulationSteps}`);
  if (memoryBudget < 1) words.push(`budget ${memoryBudget}`);
  return words.join(", ");
}

/** @typedef {{name: string, bytes: number}} Difference more than before; negative for less */

/**
 * What holds more or less at the peak of one step than at that of another, the largest first. The
 * categories add up to the difference of the peaks, and so do the modules.
 *
 * @param {Found} before
 * @param {Found} after
 * @param {number} mostGroups of modules
 * @returns {{bytes: number, categories: Difference[], modules: Difference[]}} no modules if one of
 *     the two does not know them
 */
export function differenceOf(before, after, mostGroups) {
  const [then, now] = [before, after].map(({ step, found }) => {
    const peak = Math.max(found.timeline.total.indexOf(found.peakBytes), 0);
    return { found, peak, modules: step && found.trace && BlockModules.of(step) };
  });
  const categories = CATEGORIES.map((name, at) => ({
    name: name.replace("_", " "),
    bytes: now.found.timeline.held[at][now.peak] - then.found.timeline.held[at][then.peak],
  }));
  /** @type {Difference[]} */
  let modules = [];
  if (then.modules && now.modules) {
    const names = now.modules.groupNames(now.found, mostGroups);
    const was = then.modules.byGroup(then.found, then.peak, names);
    const is = now.modules.byGroup(now.found, now.peak, names);
    modules = names.map((name, at) => ({ name, bytes: is[at] - was[at] }));
  }
  return {
    bytes: now.found.peakBytes - then.found.peakBytes,
    categories: sorted(categories),
    modules: sorted(modules),
  };
}

/** @param {Difference[]} differences */
const sorted = (differences) =>
  differences
    .filter(({ bytes }) => bytes)
    .sort((one, other) => Math.abs(other.bytes) - Math.abs(one.bytes));

/**
 * The difference of two peaks in words.
 *
 * @param {Compared} before
 * @param {Found} after
 * @param {Estimate | null} ran what the step on screen held, if that was measured
 * @param {number} mostGroups of modules
 */
export function differenceWords(before, after, ran, mostGroups) {
  const { bytes, categories, modules } = differenceOf(before.found, after, mostGroups);
  const [then, now] = [before.found.found, after.found];
  const kinds = then.how === now.how ? ["", ""] : [then, now].map(({ how }) => ` ${how}`);
  const [was, is] = [then, now].map(({ peakBytes }, at) => formatBytes(peakBytes) + kinds[at]);
  const both = `${was} before, ${is} now`;
  const title = bytes
    ? `Peak ${formatBytes(Math.abs(bytes))} ${bytes < 0 ? "lower" : "higher"}: ${both}.`
    : `The same peak: ${formatBytes(now.peakBytes)}.`;
  const said = [];
  const least = LEAST_SHARE * Math.abs(categories[0]?.bytes ?? 0);
  const told = categories.slice(0, MOST_TOLD).filter((each) => Math.abs(each.bytes) >= least);
  if (told.length) said.push(`${capital(told.map(more).join(", "))}.`);
  const [module] = modules.filter((each) => each.bytes < 0 === bytes < 0);
  if (before.isOfModel && bytes && module) {
    const name = module.name === "*" ? "its layers" : module.name || "the model itself";
    said.push(`The largest part in ${name}: ${more({ ...module, name: "" })}.`);
  }
  if (before.measured && ran) {
    const [first, last] = [before.measured, ran].map(ranWords);
    said.push(`Measured: ${first} before, ${last} now.`);
  } else if (then.seconds && now.seconds) {
    const [first, last] = [then, now].map(({ seconds }) => formatSeconds(seconds ?? 0));
    said.push(`A step takes ${first} before, ${last} now, by prediction.`);
  }
  return { title, text: said.join(" ") };
}

/** @param {Estimate} held */
const ranWords = ({ peakBytes, seconds }) =>
  `${formatBytes(peakBytes)}${seconds ? ` in ${formatSeconds(seconds)} a step` : ""}`;

/** @param {Difference} difference */
const more = ({ name, bytes }) =>
  `${name} ${formatBytes(Math.abs(bytes))} ${bytes < 0 ? "less" : "more"}`.trim();

/** @param {string} text */
const capital = (text) => text.charAt(0).toUpperCase() + text.slice(1);
