/**
 * The settings as controls. Which there are, with labels and choices, is in the catalog: a new
 * setting needs no line here.
 *
 * @typedef {import("./kernel.js").Source} Source
 * @typedef {import("./kernel.js").ControlOf} ControlOf
 * @typedef {import("./screen.js").Screen} Screen
 * @typedef {import("./store.js").Fields} Fields
 */

import { Choice, LineText, Select, SliderRow, Switch } from "./controls.js";
import { share, wholeNumber } from "./settings.js";
import { html } from "./vendor/preact.js";

/** How numbers are written. */
const COUNT = {
  parse: wholeNumber,
  allowed: "a whole number from 1",
  inWords: (/** @type {any} */ value) =>
    typeof value === "number" ? value.toLocaleString("en-US") : String(value ?? ""),
};
const SHARE = {
  parse: share,
  allowed: "a share of the activations from 0 to 1, or 40 %",
  inWords: (/** @type {any} */ value) =>
    typeof value === "number" ? `${Number((100 * value).toFixed(1))} %` : String(value ?? ""),
};

/** @param {{source: Source, screen: Screen}} props */
export function Controls({ source, screen }) {
  const { catalog, form } = source;
  const sliders = catalog.controls.filter((control) => control.place === "slider");
  const main = catalog.controls.filter((control) => control.place === "main");
  return html`<form class="ml-controls" onSubmit=${(/** @type {Event} */ e) => e.preventDefault()}>
    ${sliders.map((control) => html`<${NumberRow} ...${{ source, screen, control }} />`)}
    ${form.size && html`<${SizeRow} ...${{ source, screen }} />`}
    ${main.map((control) => html`<${MainChoice} ...${{ source, screen, control }} />`)}
    ${form.choices.length > 0 && html`<${WorkloadChoices} ...${{ source, screen }} />`}
    ${source.fixed.length > 0 && html`<${Fixed} rows=${source.fixed} />`}
  </form>`;
}

/** What rows of numbers share. @param {Source} source @param {Screen} screen @param {string} field */
function common(source, screen, field) {
  const { store, isLive } = source;
  return {
    ...(field === "memory_budget" ? SHARE : COUNT),
    id: `${source.id}-${field === "memory_budget" ? "budget" : field.split("_")[0]}`,
    value: store.state.fields[field],
    takesText: isLive,
    disabled: source.form.disabled.includes(field),
    line: screen.lines[field],
    onValue: (/** @type {any} */ value) => store.move({ [field]: value }),
    onFields: (/** @type {Fields} */ fields) => store.move(fields),
  };
}

/** @param {{source: Source, screen: Screen, control: ControlOf}} props */
function NumberRow({ source, screen, control: { field, label, tooltip, positions } }) {
  const row = { ...common(source, screen, field), label, about: tooltip };
  let values = positions;
  if (!source.isLive && field === "batch_size") {
    const ranks = source.stepsFor({})[0]?.header.data_parallel_size ?? 1;
    values = values.map((size) => size * ranks).filter((size) => size <= Math.max(...positions));
  }
  return html`<${SliderRow} ...${{ ...row, values }} />`;
}

/** The size of a sample. @param {{source: Source, screen: Screen}} props */
function SizeRow({ source, screen }) {
  const { label, offered } = /** @type {NonNullable<Source["form"]["size"]>} */ (source.form.size);
  const row = {
    ...common(source, screen, "sample_size"),
    ...{ label, values: offered, about: source.catalog.tooltips.sample_size },
    ...{ line: source.answer.size, isPast: screen.isPast },
  };
  return html`<${SliderRow} ...${row} />`;
}

/** Such as the precision: one of a few. @param {{source: Source, screen: Screen, control: ControlOf}} props */
function MainChoice({ source, screen, control: { field, label, tooltip, choices } }) {
  const { store, form } = source;
  return html`<div class="ml-main">
    <${Choice}
      name=${`${source.id}-${field}`}
      label=${label}
      about=${tooltip}
      choices=${field === "precision" ? form.precisions : choices}
      value=${store.state.fields[field]}
      onValue=${(/** @type {any} */ value) => store.move({ [field]: value })}
    />
    <${LineText}
      line=${screen.lines[field]}
      isPast=${screen.isPast}
      onFields=${(/** @type {Fields} */ fields) => store.move(fields)}
    />
  </div>`;
}

/** What a fine-tuning offers: adapter, rank, base. @param {{source: Source, screen: Screen}} props */
function WorkloadChoices({ source, screen }) {
  const { store, form, answer } = source;
  const chosen = store.state.fields.choices ?? {};
  return html`<div class="ml-choices">
    ${form.choices.map(
      ({ name, label, values, disabled }) =>
        html`<${Select}
          ...${{ label, disabled, choices: values, value: chosen[name] }}
          onValue=${(/** @type {any} */ value) =>
            store.move({ choices: { ...chosen, [name]: value } })}
        />`,
    )}
    <${LineText}
      line=${answer.choices}
      isPast=${screen.isPast}
      onFields=${(/** @type {Fields} */ fields) => store.move(fields)}
    />
  </div>`;
}

/**
 * Settings that are folded away.
 *
 * @param {{source: Source, screen: Screen, places: [string, "more" | "optimizer" | "ranks"][]}} props
 *     headings, and the places of the settings below each; "" for none
 */
export function Options({ source, screen, places }) {
  const { catalog, answer, store } = source;
  return places.map(
    ([heading, place]) =>
      html`<fieldset class="ml-options">
        ${heading && html`<legend>${heading}</legend>`}
        ${catalog.controls
          .filter((control) => control.place === place)
          .map((control) => html`<${Option} ...${{ source, screen, control }} />`)}
        <${LineText}
          line=${answer[place]}
          isPast=${screen.isPast}
          onFields=${(/** @type {Fields} */ fields) => store.move(fields)}
        />
      </fieldset>`,
  );
}

/** @param {{source: Source, screen: Screen, control: ControlOf}} props */
function Option({ source, screen, control }) {
  const { field, label, tooltip, kind, choices } = control;
  const { store, form } = source;
  if (kind === "number") return html`<${NumberRow} ...${{ source, screen, control }} />`;
  const shared = {
    ...{ label, about: tooltip, disabled: form.disabled.includes(field) },
    value: store.state.fields[field],
    onValue: (/** @type {any} */ value) => store.move({ [field]: value }),
  };
  if (kind === "switch")
    return html`<${Switch} ...${{ ...shared, value: Boolean(shared.value) }} />`;
  const own = form.own[field];
  return html`<${Select}
    ...${shared}
    choices=${own ? [...choices, { value: own, label: own }] : choices}
    value=${own ?? shared.value}
  />`;
}

/** @param {{rows: [string, string][]}} props */
const Fixed = ({ rows }) =>
  html`<div class="ml-fixed">
    <dl>
      ${rows.map(
        ([label, value]) =>
          html`<div>
            <dt>${label}</dt>
            <dd>${value}</dd>
          </div>`,
      )}
    </dl>
    <p class="ml-quiet">These are fixed here; memlab.panel(workload) in a notebook moves them.</p>
  </div>`;
