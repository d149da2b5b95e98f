/**
 * The timeline of a whole run, on the page that `run_page.py` writes: what is live as it goes on, by
 * kind, with its stages under the axis.
 *
 * @typedef {object} Payload what Python writes into the page
 * @property {object} timeline of `RunTimeline.to_dict`
 * @property {number[][]} timeline.bytes_by_category (instants, categories)
 * @property {string[]} timeline.categories
 * @property {number[]} timeline.stage (instants,) index into the stages
 * @property {string[]} timeline.stages
 * @property {number[]} timeline.operator (instants,)
 * @property {number | null} limitBytes
 * @property {string} device whose limit it is
 * @property {string} label the picture in words
 */

import { CATEGORY_STYLES } from "./colours.js";
import { TimelineChart } from "./timeline_chart.js";
import { formatBytes } from "./words.js";

const HELP = "Point at it to read it; drag over a part to zoom, double click for the whole.";

/** Shows a run in place of what the element holds. @param {HTMLElement} root @param {Payload} payload */
export function mount(root, { timeline, limitBytes, device, label }) {
  const { bytes_by_category: rows, categories, stage, stages } = timeline;
  const held = categories.map((_, column) => Float64Array.from(rows, (row) => row[column]));
  const total = Float64Array.from(rows, (row) => row.reduce((sum, bytes) => sum + bytes));
  const groups = CATEGORY_STYLES.map((style) => ({
    ...style,
    held: held[categories.indexOf(style.name)],
  }));
  root.replaceChildren();
  root.className = "ml-chart";
  const help = document.createElement("p");
  help.className = "ml-quiet";
  help.textContent = HELP;
  root.after(help);
  new TimelineChart(root).show({
    timeline: {
      ...{ held, total, operator: Int32Array.from(timeline.operator) },
      ...{ phase: new Uint8Array(rows.length), microBatch: new Int32Array(rows.length) },
      stages: { of: stage, names: stages },
    },
    ...{ groups, limitBytes, limitOf: device, label, before: null, measured: null, dimmed: "" },
    describe: (instant) => ({
      title: stages[stage[instant]],
      lines: [`${formatBytes(total[instant])} allocated`, `= ${partsOf(groups, instant)}`],
    }),
  });
}

/** What is held at an instant, the most first. @param {{label: string, held: Float64Array}[]} groups @param {number} instant */
function partsOf(groups, instant) {
  return groups
    .filter(({ held }) => held[instant] > 0)
    .sort((one, other) => other.held[instant] - one.held[instant])
    .map(({ label, held }) => `${formatBytes(held[instant])} ${label}`)
    .join(" + ");
}
