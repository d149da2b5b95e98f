/**
 * Whether a step fits a limit, judged as `CountedPeak` in `memlab/result.py` judges it.
 *
 * @typedef {import("./estimate.js").Estimate} Estimate
 * @typedef {import("./recorded_step.js").RecordedStep} RecordedStep
 *
 * @typedef {"good" | "warn" | "bad" | "open"} Kind
 * @typedef {{kind: Kind, text: string, detail: string}} Verdict
 */

import { formatBytes, plusMinus } from "./words.js";

export const SYMBOLS = { good: "✔", warn: "▲", bad: "✖", open: "○" };

/** The peak that counts against a limit. @param {Estimate} found */
export function countedPeak(found) {
  const kind = found.reservedBytes === null ? "allocated" : "reserved";
  return {
    kind,
    bytes: found.reservedBytes ?? found.peakBytes,
    width: found.uncertainty[`peak_${kind}_bytes`] ?? 0,
  };
}

/**
 * @param {RecordedStep | null} step null for a result
 * @param {Estimate} found
 * @param {number | null} limit bytes; null for none
 * @param {string} device as it is named to people
 * @returns {Verdict}
 */
export function fitVerdict(step, found, limit, device) {
  const peak = countedPeak(found);
  const { how, isWhole = true } = found;
  if (!isWhole) {
    const text = `not known: the step ended at ${formatBytes(peak.bytes)} ${peak.kind}`;
    return { kind: "open", text, detail: "" };
  }
  if (limit === null) {
    return {
      kind: "open",
      text: `peak ${formatBytes(peak.bytes)} ${peak.kind}, ${how}`,
      detail: "no limit is set",
    };
  }
  const runs = runsWithin(step, found);
  const { fits, isClose } = judged(peak, found.uncertainty.needed_bytes ?? 0, limit, runs);
  const verb = peak.kind === "reserved" ? "reserves" : "takes";
  const share = `${verb} ${formatBytes(peak.bytes)} of ${formatBytes(limit)}`;
  const where = `${how} ${how === "measured" || how === "recorded" ? "on" : "for"} ${device}`;
  const detail = `peak ${peak.kind} bytes, ${where}${plusMinus(peak.width)}`;
  if (isClose) return { kind: "warn", text: `too close to say: ${share}, ${how}`, detail };
  if (fits) {
    const less = peak.bytes > limit ? " with less cache" : "";
    return { kind: "good", text: `fits${less}: ${share}, ${how}`, detail };
  }
  const times = peak.bytes / limit;
  const far = times >= 2 ? `, ${times.toFixed(times < 10 ? 1 : 0)} times as much` : "";
  return { kind: "bad", text: `does not fit: ${share}${far}, ${how}`, detail };
}

/**
 * @param {{bytes: number, width: number}} peak
 * @param {number} neededWidth of what is needed at the limit; 0 if it is not known
 * @param {number} limit
 * @param {((limit: number) => boolean) | null} runs within a limit, although the peak is above it
 */
function judged(peak, neededWidth, limit, runs) {
  /** @param {number} bytes */
  const fitsIn = (bytes) => peak.bytes <= bytes || (runs !== null && runs(bytes));
  const fits = fitsIn(limit);
  const width = runs !== null && neededWidth ? neededWidth : peak.width;
  if (!width) return { fits, isClose: false };
  if (fits) return { fits, isClose: !fitsIn(Math.trunc(limit / (1 + width))) };
  return { fits, isClose: width >= 1 || fitsIn(Math.trunc(limit / (1 - width))) };
}

/** @param {RecordedStep | null} step @param {Estimate} found */
function runsWithin(step, found) {
  const { sizes, neededBytes } = found;
  if (neededBytes) return (/** @type {number} */ limit) => neededBytes <= limit;
  if (!sizes || !step?.header.allocator) return null;
  return (/** @type {number} */ limit) => step.runsWithin(sizes, limit);
}
