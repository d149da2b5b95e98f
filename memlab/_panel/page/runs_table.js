/**
 * The runs so far: a table to sort, filter, name and compare, and their memory against time.
 *
 * @typedef {import("./kernel.js").Source} Source
 * @typedef {import("./screen.js").Screen} Screen
 * @typedef {import("./runs_order.js").Runs} Runs
 * @typedef {import("./runs_order.js").RunRow} RunRow
 */

import { NOTHING, compare } from "./compared.js";
import { Button, Said, Select, Switch, TextBox, valueOf } from "./controls.js";
import { saveText } from "./picture.js";
import { RunsChart } from "./runs_chart.js";
import { ORDERS, shownRows } from "./runs_order.js";
import { html, useState } from "./vendor/preact.js";

/** @param {{source: Source, screen: Screen}} props */
export function RunsTable({ source, screen }) {
  const [wanted, want] = useState({ order: ORDERS[0], words: "", withStopped: false });
  const runs = /** @type {Runs} */ (source.runs);
  const isOne = !source.isLive && runs.rows.length === 1;
  const rows = isOne ? runs.rows : shownRows(runs.rows, wanted);
  const hidden = runs.rows.length - rows.length;
  const table = html`<div class="ml-scroll" tabindex="0" role="group" aria-label="Table of runs">
    <${Rows} ...${{ source, rows, columns: runs.columns }} />
  </div>`;
  if (isOne) return html`<section class="ml-table" aria-label="Runs">${table}</section>`;
  return html`<section class="ml-table" aria-label="Runs">
    <div class="ml-table-tools">
      <b>Runs</b>
      <${Select}
        label="Sort"
        choices=${ORDERS.map((value) => ({ value, label: value }))}
        value=${wanted.order}
        onValue=${(/** @type {string} */ order) => want({ ...wanted, order })}
      />
      <label class="ml-field">
        <span>Filter</span>
        <input
          class="ml-box"
          type="text"
          placeholder="bf16 adamw"
          title="rows that have all these words"
          value=${wanted.words}
          onInput=${(/** @type {Event} */ event) => want({ ...wanted, words: valueOf(event) })}
        />
      </label>
      <${Switch}
        label="stopped"
        about="show runs that were stopped"
        value=${wanted.withStopped}
        onValue=${(/** @type {boolean} */ withStopped) => want({ ...wanted, withStopped })}
      />
      <span class="ml-quiet">${hidden ? `${hidden} not shown` : ""}</span>
      ${source.isLive && html`<span class="ml-tools"><${TableButtons} source=${source} /></span>`}
    </div>
    ${
      rows.length > 0
        ? table
        : html`<p class="ml-quiet ml-empty">
            ${hidden ? "No run has these words." : "No runs yet: press Run, or Enter in a number box."}
          </p>`
    }
    <${RunsChart} ...${{ source, screen, rows }} />
  </section>`;
}

/** @param {{source: Source}} props */
function TableButtons({ source }) {
  const { rows, canUndo, total } = /** @type {Runs} */ (source.runs);
  const save = () => source.askCsv((text) => saveText(text, "text/csv", "runs.csv"));
  return html`<${Button}
      name="CSV"
      about="save all runs as a file"
      disabled=${!total}
      onPress=${save}
    />
    <${Button}
      name="clear"
      about="take runs that are not pinned off the table"
      disabled=${!rows.some((row) => !row.isPinned)}
      onPress=${() => source.tell({ type: "clear" })}
    />
    <${Button}
      name="undo clear"
      disabled=${!canUndo}
      onPress=${() => source.tell({ type: "undoClear" })}
    />`;
}

/** @param {{source: Source, rows: RunRow[], columns: Runs["columns"]}} props */
function Rows({ source, rows, columns }) {
  const kindOf = (/** @type {Runs["columns"][number]} */ { isNumber, isLong }) =>
    `${isNumber ? "ml-number" : ""}${isLong ? " ml-long" : ""}`;
  return html`<table class="ml-runs">
    <thead>
      <tr>
        ${columns.map(
          (column) =>
            html`<th scope="col" class=${kindOf(column)} title=${column.title}>${column.name}</th>`,
        )}
        ${source.isLive && html`<th scope="col" class="ml-acts">compare, keep</th>`}
      </tr>
    </thead>
    <tbody>
      ${rows.map(
        (row) =>
          html`<tr key=${row.number} class=${source.answer.run === row.number ? "ml-here" : ""}>
            ${row.cells.map(
              (cell, at) =>
                html`<td class=${kindOf(columns[at])} title=${typeof cell === "string" ? cell : ""}>
                  ${typeof cell === "string" ? cell : html`<${Said} verdict=${cell} />`}
                </td>`,
            )}
            ${source.isLive && html`<td class="ml-acts"><${Acts} ...${{ source, row }} /></td>`}
          </tr>`,
      )}
    </tbody>
  </table>`;
}

/** @param {{source: Source, row: RunRow}} props */
function Acts({ source, row }) {
  const { number, name, isPinned, isCompared } = row;
  const pin = (/** @type {string | null} */ given) =>
    source.tell({ type: "pin", run: number, name: given });
  return html`<span>
    <button
      type="button"
      title="show its memory beside the picture"
      aria-pressed=${isCompared}
      aria-label=${`compare run ${number}`}
      onClick=${() => compare(source, isCompared ? NOTHING : number)}
    >
      compare
    </button>
    <button
      type="button"
      title="keep it on the table, under a name"
      aria-pressed=${isPinned}
      aria-label=${`pin run ${number}`}
      onClick=${() => pin(isPinned ? null : "")}
    >
      pin
    </button>
    ${
      isPinned &&
      html`<${TextBox}
        placeholder="name"
        aria-label=${`name of run ${number}`}
        value=${name}
        onValue=${pin}
      />`
    }
  </span>`;
}
