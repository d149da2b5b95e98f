/**
 * The panes that open below the picture: what fits, what holds the peak, what each rank holds, cards,
 * what a quantized base saves, what a ± rests on, code, help.
 *
 * @typedef {import("./kernel.js").Source} Source
 * @typedef {import("./store.js").Fields} Fields
 * @typedef {import("./verdict.js").Verdict} Verdict
 */

import { CATEGORY_STYLES, inkOn } from "./colours.js";
import { Button, LineText, Said } from "./controls.js";
import { html, useState } from "./vendor/preact.js";
import { formatBytes } from "./words.js";

const PAST = "found for other settings than those on screen";

/** @type {Record<string, (props: {source: Source, pane: any}) => any>} */
export const PANES = {
  fit: Fit,
  base: Base,
  peak: Peak,
  ranks: Ranks,
  evidence: Evidence,
  cards: Cards,
  code: Code,
  help: ({ source }) => html`<${Help} help=${source.catalog.help} />`,
};

/** What is asked of other settings than those on screen. @param {{isPast: boolean, again?: string}} props */
const Past = ({ isPast, again = "" }) =>
  html`<${LineText} line=${isPast ? { text: `${PAST}${again}`, kind: "warn" } : null} />`;

/** @param {{source: Source, pane: any}} props */
function Fit({ source, pane: { answer, about, isPast, rows, notes } }) {
  return html`<p><b>${answer}</b></p>
    ${about && html`<p class="ml-quiet">${about}</p>`}
    <${Past} isPast=${isPast} again=": press Fit for me again" />
    <ol class="ml-fits">
      ${rows.map(
        (/** @type {any} */ row, /** @type {number} */ at) =>
          html`<li class=${row.isHere ? "ml-here" : ""}>
            <${Button}
              name=${`use ${at + 1}`}
              disabled=${source.job.running}
              onPress=${() => source.tell({ type: "use", pane: "fit", at })}
            />
            <span>${row.settings}</span>
            <span class="ml-quiet">${row.price}</span>
            ${row.isClose && html`<${Said} verdict=${{ kind: "warn", text: "too close to say" }} />`}
            ${row.isHere && html`<b>on screen</b>`}
          </li>`,
      )}
    </ol>
    ${
      notes.length > 0 &&
      html`<p>Left alone:</p>
        <ul>
          ${notes.map((/** @type {string} */ note) => html`<li>${note}</li>`)}
        </ul>`
    }`;
}

/** @param {{source: Source, pane: any}} props */
function Base({ source, pane: { answer, about, isPast, canAsk, causes, rows } }) {
  return html`<p><b>${answer}</b></p>
    ${about && html`<p class="ml-quiet">${about}</p>`}
    <${Past} isPast=${isPast} />
    <${Button}
      name="compare with a base in bf16"
      disabled=${!canAsk}
      onPress=${() => source.tell({ type: "compareBase" })}
    />
    ${causes.length > 0 && html`<${Plain} heads=${["what", "difference", "why"]} rows=${causes} />`}
    <ol class="ml-fits">
      ${rows.map(
        (/** @type {any} */ row, /** @type {number} */ at) =>
          html`<li>
            <${Button}
              name=${row.name}
              disabled=${!row.leads || source.job.running}
              onPress=${() => source.tell({ type: "use", pane: "base", at })}
            />
            <span>${row.effect}</span>
          </li>`,
      )}
    </ol>`;
}

/** @param {{source: Source, pane: any}} props */
function Peak({ source: { store }, pane: { sentence, facts, remedies } }) {
  return html`<p><b>${sentence}</b></p>
    <ul>
      ${facts.map((/** @type {string} */ fact) => html`<li>${fact}</li>`)}
    </ul>
    <div class="ml-remedies">
      ${remedies.map(
        (/** @type {{label: string, effect: string, fields: Fields}} */ remedy) =>
          html`<button type="button" onClick=${() => store.move(remedy.fields)}>
            <b>${remedy.label}</b> <span>${remedy.effect}</span>
          </button>`,
      )}
    </div>`;
}

/** @param {{source: Source, pane: any}} props */
function Ranks({ pane: { alone, ranks, sent } }) {
  if (alone) return html`<p>${alone}</p>`;
  const limits = ranks.map((/** @type {any} */ rank) => rank.limitBytes ?? 0);
  const most = 1.05 * Math.max(...ranks.map((/** @type {any} */ rank) => rank.bytes), ...limits, 1);
  return html`<div class="ml-ranks">
      ${ranks.map((/** @type {any} */ rank) => html`<${Rank} rank=${rank} most=${most} />`)}
    </div>
    ${
      sent &&
      html`<p>${sent.caption}</p>
        <${Plain} heads=${sent.heads} rows=${sent.rows} />`
    }`;
}

/** What one rank holds, with the limit as a line. @param {{rank: any, most: number}} props */
function Rank({ rank: { label, bytes, byCategory, limitBytes }, most }) {
  const isOver = limitBytes !== null && bytes > limitBytes;
  const parts = CATEGORY_STYLES.filter(({ name }) => byCategory[name] > 0);
  const share = (/** @type {number} */ held) => `${(100 * held) / most}%`;
  return html`<div class="ml-rank">
    <span>${label}</span>
    <span class="ml-rank-bar">
      ${parts.map(
        ({ name, label: category, colour }) =>
          html`<span
            title=${`${category}: ${formatBytes(byCategory[name])}`}
            style=${{ width: share(byCategory[name]), background: colour, color: inkOn(colour) }}
            ><span>${category} ${formatBytes(byCategory[name])}</span></span
          >`,
      )}
      ${limitBytes !== null && html`<i style=${{ left: share(limitBytes) }}></i>`}
    </span>
    <span class=${isOver ? "ml-bad" : ""}
      >${formatBytes(bytes)}${limitBytes === null ? "" : ` of ${formatBytes(limitBytes)}`}</span
    >
  </div>`;
}

/** @param {{pane: any}} props */
function Evidence({ pane: { about, heads, numbers } }) {
  return html`<p>${about}</p>
    ${numbers.map(
      (/** @type {any} */ { title, about: more, rows }) =>
        html`<h4>${title}</h4>
          ${more && html`<p class="ml-quiet">${more}</p>`}
          <${Plain} heads=${heads} rows=${rows} />`,
    )}`;
}

/** @param {{source: Source, pane: any}} props */
function Cards({ source: { store, job }, pane: { isPast, heads, rows } }) {
  return html`<${Past} isPast=${isPast} />
    <div class="ml-scroll" tabindex="0" role="group" aria-label="This setting on several cards">
      <table class="ml-plain">
        <thead>
          <tr>
            ${heads.map(
              (/** @type {[string, string]} */ [name, title]) =>
                html`<th scope="col" title=${title}>${name}</th>`,
            )}
            <th scope="col">show</th>
          </tr>
        </thead>
        <tbody>
          ${rows.map(
            (/** @type {any} */ row) =>
              html`<tr class=${row.isHere ? "ml-here" : ""}>
                ${row.cells.map(
                  (/** @type {string | Verdict} */ cell) =>
                    html`<td>
                      ${typeof cell === "string" ? cell : html`<${Said} verdict=${cell} />`}
                    </td>`,
                )}
                <td>
                  <${Button}
                    name="show"
                    label=${`show ${row.name}`}
                    disabled=${row.isHere || job.running}
                    onPress=${() => store.move({ device: row.name })}
                  />
                </td>
              </tr>`,
          )}
        </tbody>
      </table>
    </div>`;
}

/** @param {{pane: [string, string][]}} props */
function Code({ pane }) {
  return pane.map(([heading, source]) => html`<${Source} ...${{ heading, source }} />`);
}

/** @param {{heading: string, source: string}} props */
function Source({ heading, source }) {
  const [said, say] = useState("");
  const copy = async () => {
    try {
      await navigator.clipboard.writeText(source);
      say("copied");
    } catch {
      say("the browser does not allow it: select the text");
    }
  };
  return html`<section>
    <h4>
      ${heading}
      <button type="button" aria-label=${`copy: ${heading}`} onClick=${copy}>copy</button>
      <span class="ml-quiet" role="status">${said}</span>
    </h4>
    <pre tabindex="0">${source}</pre>
  </section>`;
}

/** @param {{help: {general: string, heads: string[], rows: string[][]} | null}} props */
const Help = ({ help }) =>
  help &&
  html`<div class="ml-help" dangerouslySetInnerHTML=${{ __html: help.general }}></div>
    <${Plain} heads=${help.heads} rows=${help.rows} />`;

/** A table of texts; what is in backticks is code. @param {{heads: string[], rows: string[][]}} props */
const Plain = ({ heads, rows }) =>
  html`<div class="ml-scroll" tabindex="0" role="group" aria-label=${heads.join(", ")}>
    <table class="ml-plain">
      <thead>
        <tr>
          ${heads.map((head) => html`<th scope="col">${head}</th>`)}
        </tr>
      </thead>
      <tbody>
        ${rows.map(
          (row) =>
            html`<tr>
              ${row.map((cell) => html`<td>${withCode(String(cell))}</td>`)}
            </tr>`,
        )}
      </tbody>
    </table>
  </div>`;

/** @param {string} text */
const withCode = (text) =>
  text.split("`").map((part, at) => (at % 2 ? html`<code>${part}</code>` : part));
