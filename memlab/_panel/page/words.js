/** Numbers and settings in words, as `memlab/_util/units.py` and `_panel/texts.py` write them. */

/** @typedef {import("./estimate.js").Setting} Setting */

const KIB = 2 ** 10;
/** Units and their bytes, the largest first. @type {[string, number][]} */
export const SIZES = [
  ["TiB", KIB ** 4],
  ["GiB", KIB ** 3],
  ["MiB", KIB ** 2],
  ["KiB", KIB],
];
/** @type {Record<string, number>} */
const BYTES_PER_UNIT = {
  B: 1,
  KB: 1e3,
  MB: 1e6,
  GB: 1e9,
  TB: 1e12,
  KIB: KIB,
  MIB: KIB ** 2,
  GIB: KIB ** 3,
  TIB: KIB ** 4,
};

/** @param {number} number @param {[string, number][]} units */
function inLargest(number, units) {
  for (const [unit, factor] of units) {
    if (Math.abs(number) >= factor) {
      const scaled = number / factor;
      const digits = Number(Math.abs(scaled) < 100) + Number(Math.abs(scaled) < 10);
      return `${scaled.toFixed(digits)} ${unit}`;
    }
  }
  return "";
}

/** Such as "1.31 GiB". @param {number} bytes */
export const formatBytes = (bytes) => inLargest(bytes, SIZES) || `${bytes.toFixed(0)} B`;

/** Such as "412 ms". @param {number} seconds */
export function formatSeconds(seconds) {
  const found = inLargest(seconds, [
    ["s", 1],
    ["ms", 1e-3],
  ]);
  return found || `${(seconds * 1e6).toFixed(0)} us`;
}

/** Such as "1.2 %". @param {number} fraction */
export function formatPercent(fraction) {
  const percent = 100 * fraction;
  if (Math.abs(percent) >= 10) return `${percent.toFixed(0)} %`;
  return `${Number(percent.toPrecision(2))} %`;
}

/** @param {number | undefined} width */
export const plusMinus = (width) => (width ? ` ± ${formatPercent(width)}` : "");

/**
 * The bytes that a typed limit means, as Python reads it; "8" is asked back as 8 GiB, "" is none.
 *
 * @param {string} text
 * @returns {{bytes: number | null, problem: string, meant: string}}
 */
export function parseLimit(text) {
  const none = { bytes: null, problem: "", meant: "" };
  if (!text.trim()) return none;
  const match = /^\s*(\d*\.?\d+)\s*([A-Za-z]*)\s*$/.exec(text);
  const unit = match?.[2].toUpperCase() || "B";
  const bytes = match ? Math.floor(Number(match[1]) * (BYTES_PER_UNIT[unit] ?? 0)) : 0;
  if (match && !match[2] && Number(match[1]) && bytes < KIB ** 2) {
    return { bytes: bytes || null, problem: `${match[1]} what?`, meant: `${match[1]} GiB` };
  }
  if (bytes >= 1) return { ...none, bytes };
  return { ...none, problem: 'not a size: write for instance "7.5 GiB"' };
}

/** What the micro-batches are. @param {number[]} sizes */
export function splitText(sizes) {
  const [first, last] = [sizes[0], sizes[sizes.length - 1]];
  if (sizes.length === 1) return "the batch is not split";
  if (first === last) return `${sizes.length} micro-batches of ${first}`;
  const more = sizes.filter((size) => size === first).length;
  const noun = more === 1 ? "micro-batch" : "micro-batches";
  return `${more} ${noun} of ${first} and ${sizes.length - more} of ${last}, weighted by their samples`;
}
