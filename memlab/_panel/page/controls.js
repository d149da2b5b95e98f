/** Native controls with the line that says what a value means. */

import { html } from "./vendor/preact.js";
import { SYMBOLS } from "./verdict.js";

/**
 * @typedef {import("./verdict.js").Kind} Kind
 * @typedef {{text: string, kind?: Kind, remedy?: {label: string, use: () => void}}} Line
 */

/**
 * A slider with its number box and line.
 *
 * @param {object} props
 * @param {string} props.id
 * @param {string} props.label
 * @param {number[]} props.values positions of the slider, ascending
 * @param {number} props.value may lie between them
 * @param {(value: number) => void} props.onValue
 * @param {(value: number) => string} props.inWords
 * @param {(text: string) => number | null} props.parse of the number box; null if not allowed
 * @param {string} props.allowed what the number box accepts, in words
 * @param {Line} props.line
 * @param {number} props.pageStep positions that Page keys move
 */
export function SliderRow(props) {
  const { id, label, values, value, onValue, inWords, parse, allowed, line, pageStep } = props;
  const at = nearest(values, value);
  /** @param {number} position */
  const go = (position) => onValue(values[Math.min(Math.max(position, 0), values.length - 1)]);
  /** @param {KeyboardEvent} event */
  const onKey = (event) => {
    const by = { PageUp: pageStep, PageDown: -pageStep }[event.key];
    if (by === undefined) return;
    event.preventDefault();
    go(at + by);
  };
  /** @param {Event} event */
  const onBox = (event) => {
    const box = /** @type {HTMLInputElement} */ (event.target);
    const typed = parse(box.value);
    box.setCustomValidity(typed === null ? allowed : "");
    box.reportValidity();
    if (typed !== null) onValue(typed);
  };
  return html`<div class="ml-row">
    <label for=${id}>${label}</label>
    <input
      id=${id}
      type="range"
      min="0"
      max=${values.length - 1}
      step="1"
      value=${at}
      aria-valuetext=${inWords(value)}
      aria-describedby=${`${id}-line`}
      onInput=${(/** @type {Event} */ event) =>
        go(Number(/** @type {HTMLInputElement} */ (event.target).value))}
      onKeyDown=${onKey}
    />
    <input
      class="ml-box"
      type="text"
      inputmode="decimal"
      aria-label=${`${label}: ${allowed}`}
      title=${allowed}
      value=${inWords(value)}
      onChange=${onBox}
    />
    <${LineText} id=${`${id}-line`} line=${line} />
  </div>`;
}

/** @param {{id?: string, line: Line}} props */
export function LineText({ id, line }) {
  const { text, kind = "open", remedy } = line;
  return html`<p class=${`ml-line ml-${kind}`} id=${id}>
    ${kind === "open" ? "" : html`<span aria-hidden="true">${SYMBOLS[kind]} </span>`}${text}
    ${remedy && html`<button type="button" onClick=${remedy.use}>${remedy.label}</button>`}
  </p>`;
}

/**
 * One of a few, as radio buttons in a row.
 *
 * @param {object} props
 * @param {string} props.name
 * @param {string} props.label
 * @param {{value: string, label: string, refused?: string}[]} props.choices
 * @param {string} props.value
 * @param {(value: string) => void} props.onValue
 */
export function Choice({ name, label, choices, value, onValue }) {
  return html`<fieldset class="ml-choice">
    <legend>${label}</legend>
    ${choices.map(
      (choice) =>
        html`<label title=${choice.refused ?? ""}>
          <input
            type="radio"
            name=${name}
            value=${choice.value}
            checked=${choice.value === value}
            disabled=${Boolean(choice.refused)}
            onChange=${() => onValue(choice.value)}
          />
          <span>${choice.label}</span>
        </label>`,
    )}
  </fieldset>`;
}

/** The index of the value that is nearest. @param {number[]} values @param {number} value */
export function nearest(values, value) {
  let found = 0;
  values.forEach((one, at) => {
    if (Math.abs(one - value) < Math.abs(values[found] - value)) found = at;
  });
  return found;
}

/** 1, 2, 3, 4, 6, 8, 12, ... up to a number. @param {number} most */
export function halfOctaves(most) {
  const values = [1];
  for (let power = 2; power <= most; power *= 2) {
    values.push(power);
    if (power * 1.5 <= most) values.push(power * 1.5);
  }
  return values;
}
