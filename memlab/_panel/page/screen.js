/**
 * What is on screen, from what is set and what is known: the same for a kernel and a saved page.
 *
 * @typedef {import("./kernel.js").Source} Source
 * @typedef {import("./estimate.js").Estimate} Estimate
 * @typedef {import("./recorded_step.js").RecordedStep} Step
 * @typedef {import("./controls.js").Line} Line
 * @typedef {import("./verdict.js").Verdict} Verdict
 * @typedef {{step: Step | null, found: Estimate}} Found a result of which there is no recording has no step
 *
 * @typedef {object} Screen
 * @property {Found | null} best the page's own estimate of what is set, or else what its run held
 * @property {Found | null} shown the newest estimate, perhaps of other settings
 * @property {Found | null} before of the settings before the last move; the best if none changed the step
 * @property {string} problem why the settings cannot be; "" if they can
 * @property {string} why the picture is not of what is set; "" if it is
 * @property {ReturnType<typeof parseLimit>} limit
 * @property {number | null} limitBytes that counts
 * @property {Verdict} fit the badge
 * @property {string} costs in the kernel's words; "" if the page's own estimate counts
 * @property {{bytes: number, kind: string} | null} peak that is compared with the limit
 * @property {Record<string, Line>} lines beside controls, by field
 * @property {boolean} isPast whether what only the kernel knows is of other settings
 */

import { bestEstimate } from "./estimate.js";
import { MOST_MICRO_BATCHES, familyKey, ownLines, problemOf, settingOf } from "./settings.js";
import { useMemo, useRef } from "./vendor/preact.js";
import { countedPeak, fitVerdict } from "./verdict.js";
import { parseLimit } from "./words.js";

const NEEDS_KERNEL = "not known from this recording: ask memlab in a notebook";
const NO_PICTURE = "there is no prediction of these settings to draw, and no measured memory";
const WRONG_NUMBER = "a number is wrong: see the line below it";

/** @param {Source} source @returns {Screen} */
export function useScreen(source) {
  const { answer, store, isCurrent } = source;
  const { fields } = store.state;
  const steps = source.stepsFor(fields);
  const problem = problemIn(source, steps);
  const text = JSON.stringify(settingOf(fields));
  const ran = source.ran(fields);
  const best = useMemo(
    () => (problem ? null : (estimateOf(steps, fields) ?? (ran && { step: null, found: ran }))),
    [steps, text, problem, ran],
  );
  const was = store.before;
  // a move of the limit leaves the step as it is
  const isOther =
    was && (familyKey(was) !== familyKey(fields) || JSON.stringify(settingOf(was)) !== text);
  const before = useMemo(
    () => (was && isOther ? estimateOf(source.stepsFor(was), was) : best),
    [steps, was, isOther, best],
  );
  const newest = useRef(/** @type {Found | null} */ (null));
  newest.current = best ?? newest.current ?? source.first ?? null;

  const limit = parseLimit(String(fields.memory_limit ?? ""));
  const limitBytes = limitOf(source, limit.bytes);
  const verdict = useMemo(
    () => best && fitVerdict(best.step, best.found, limitBytes, answer.device),
    [best, limitBytes, answer.device],
  );
  const why = problem || whyNot(source, best);
  const isTold =
    isCurrent && !problem && (answer.source === "run" || !best) && answer.fit.text !== "";
  const run = isTold ? source.runs?.rows.find((row) => row.number === answer.run) : null;
  const open = /** @type {Verdict} */ ({ kind: "open", text: why, detail: "" });
  let peak = best && countedPeak(best.found);
  if (run?.peakBytes) peak = { bytes: run.peakBytes, kind: run.kindOfPeak, width: 0 };
  return {
    ...{ best, before, problem, why, limit, limitBytes, peak },
    shown: newest.current,
    fit: isTold ? answer.fit : ((why ? null : verdict) ?? open),
    costs: isTold ? answer.costs : "",
    lines: linesOf(source, { best, problem, steps }),
    isPast: !isCurrent,
  };
}

/** @param {Step[]} steps @param {import("./store.js").Fields} fields */
function estimateOf(steps, fields) {
  const setting = settingOf(fields);
  if (!setting || setting.accumulationSteps > MOST_MICRO_BATCHES) return null;
  if (problemOf(setting, steps[0]?.header.data_parallel_size ?? 1)) return null;
  const text = JSON.stringify(setting);
  const last = known.get(steps) ?? [];
  const found = last.find((each) => each.text === text) ?? {
    text,
    best: bestEstimate(steps, setting),
  };
  known.set(steps, [found, ...last.filter((each) => each !== found)].slice(0, 3));
  return found.best;
}

/**
 * The last estimates: of what is set, and of what was set before this and the last move.
 *
 * @type {WeakMap<Step[], {text: string, best: ReturnType<typeof bestEstimate>}[]>}
 */
const known = new WeakMap();

/** Why the settings cannot be; "" if they can, as far as the page knows. @param {Source} source @param {Step[]} steps */
function problemIn(source, steps) {
  const setting = settingOf(source.store.state.fields);
  if (!setting) return WRONG_NUMBER;
  if (steps.length && !source.isLive && setting.accumulationSteps > MOST_MICRO_BATCHES) {
    return `this page computes at most ${MOST_MICRO_BATCHES} micro-batches`;
  }
  return problemOf(setting, steps[0]?.header.data_parallel_size ?? 1);
}

/** Why the picture is not of what is set; "" if it is. @param {Source} source @param {Found | null} best */
function whyNot({ isLive, isCurrent, answer, trouble }, best) {
  if (!isLive || trouble === "gone") return best ? "" : (!isLive && answer.note) || NEEDS_KERNEL;
  if (isCurrent && answer.note) return answer.note;
  if (best) return "";
  if (isCurrent && answer.exact && !answer.steps.length) return NO_PICTURE;
  return (isCurrent && answer.doing) || "predicting";
}

/** The limit that counts: a person's own one counts below what the device has. @param {Source} source @param {number | null} typed */
function limitOf({ isLive, isCurrent, answer }, typed) {
  if (isLive && isCurrent) return answer.limitBytes;
  if (typed === null) return answer.usableBytes;
  return isLive ? Math.min(typed, answer.usableBytes ?? Infinity) : typed;
}

/**
 * The kernel's lines; while a slider moves, the page's own ones.
 *
 * @param {Source} source
 * @param {{best: Found | null, problem: string, steps: Step[]}} known
 */
function linesOf(source, { best, problem, steps }) {
  const { answer, isLive, isCurrent } = source;
  if (isLive && isCurrent) return answer.lines;
  const setting = settingOf(source.store.state.fields);
  if (!setting) return answer.lines;
  const unknown = isLive || best ? "" : NEEDS_KERNEL;
  const { divided } = answer;
  return { ...answer.lines, ...ownLines({ setting, steps, best, problem, unknown, divided }) };
}
