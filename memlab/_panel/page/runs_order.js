/**
 * Which runs the table shows, and in which order.
 *
 * @typedef {import("./verdict.js").Verdict} Verdict
 *
 * @typedef {object} RunRow
 * @property {number} number
 * @property {string} name
 * @property {boolean} isPinned
 * @property {boolean} isPredicted
 * @property {boolean} isEarlier
 * @property {boolean} isStopped
 * @property {boolean} isCompared
 * @property {string} device
 * @property {string} workload
 * @property {(string | Verdict)[]} cells
 * @property {number | null} peakBytes
 * @property {number | null} samplesPerSecond
 * @property {number | null} seconds
 * @property {string} kindOfPeak
 * @property {string} label
 * @property {string} settings in words
 * @property {import("./estimate.js").Setting} setting that a page computes with
 *
 * @typedef {object} Runs
 * @property {{name: string, title: string, isNumber: boolean, isLong: boolean}[]} columns
 * @property {RunRow[]} rows newest last
 * @property {boolean} canUndo
 * @property {number} total
 */

export const ORDERS = ["newest first", "least memory", "most samples/s"];

/** @param {string | Verdict} cell */
export const cellText = (cell) => (typeof cell === "string" ? cell : cell.text);

/**
 * @param {RunRow[]} rows newest last
 * @param {{order: string, words: string, withStopped: boolean}} wanted every word must be in some cell
 * @returns {RunRow[]}
 */
export function shownRows(rows, { order, words, withStopped }) {
  const all = words.toLowerCase().split(/\s+/).filter(Boolean);
  const found = rows.filter((row) => {
    const text = [...row.cells.map(cellText), row.name].join(" ").toLowerCase();
    return (withStopped || !row.isStopped) && all.every((word) => text.includes(word));
  });
  found.reverse();
  // sorting keeps the order of equal ones, so the newest of these is first
  if (order === ORDERS[1]) {
    found.sort((one, other) => (one.peakBytes ?? Infinity) - (other.peakBytes ?? Infinity));
  }
  if (order === ORDERS[2]) {
    found.sort((one, other) => (other.samplesPerSecond ?? -1) - (one.samplesPerSecond ?? -1));
  }
  return found;
}
