/** Native controls with the line that says what a value means. */

import { html, useEffect, useState } from "./vendor/preact.js";
import { SYMBOLS } from "./verdict.js";

/**
 * @typedef {import("./verdict.js").Kind} Kind
 * @typedef {import("./verdict.js").Verdict} Verdict
 * @typedef {import("./store.js").Fields} Fields
 * @typedef {import("./kernel.js").Option} Option
 * @typedef {object} Line
 * @property {string} text
 * @property {Kind} kind
 * @property {Verdict | null} [verdict] after the text
 * @property {{label: string, fields: Fields} | null} [remedy] a button, and what it sets
 */

/** What a person has typed or chosen. @param {Event} event */
export const valueOf = (event) =>
  /** @type {HTMLInputElement | HTMLSelectElement} */ (event.target).value;

/**
 * A slider with its number box and line.
 *
 * @param {object} props
 * @param {string} props.id
 * @param {string} props.label
 * @param {string} [props.about] what it does, shown to who points at the label
 * @param {number[]} props.values positions of the slider, ascending
 * @param {any} props.value may lie between them, or be a wrong text
 * @param {(value: any) => void} props.onValue
 * @param {(value: any) => string} props.inWords
 * @param {(text: string) => number | null} props.parse of the number box; null if not allowed
 * @param {string} props.allowed what the number box accepts, in words
 * @param {boolean} props.takesText whether a wrong text is set too, for the kernel to explain
 * @param {boolean} [props.disabled]
 * @param {Line | null | undefined} props.line
 * @param {boolean} [props.isPast] whether the line is of other settings
 * @param {(fields: Fields) => void} props.onFields of a remedy
 */
export function SliderRow(props) {
  const { id, label, about = "", values, value, onValue, inWords, disabled = false } = props;
  const at = typeof value === "number" ? nearest(values, value) : 0;
  /** @param {number} position */
  const go = (position) => onValue(values[Math.min(Math.max(position, 0), values.length - 1)]);
  /** @param {KeyboardEvent} event */
  const onKey = (event) => {
    const by = { PageUp: 4, PageDown: -4 }[event.key];
    if (by === undefined) return;
    event.preventDefault();
    go(at + by);
  };
  return html`<div class="ml-row">
    <label for=${`${id}-box`} title=${about}>${label}</label>
    <input
      id=${id}
      type="range"
      min="0"
      max=${values.length - 1}
      step="1"
      value=${at}
      disabled=${disabled}
      title=${about}
      aria-label=${`${label} slider`}
      aria-valuetext=${inWords(value)}
      aria-describedby=${`${id}-line`}
      onInput=${(/** @type {Event} */ event) => go(Number(valueOf(event)))}
      onKeyDown=${onKey}
    />
    <${NumberBox} ...${props} />
    <${LineText} ...${props} id=${`${id}-line`} />
  </div>`;
}

/** The box of a number: what is typed counts at once. @param {Parameters<typeof SliderRow>[0]} props */
export function NumberBox({ id, value, onValue, inWords, parse, allowed, takesText, ...rest }) {
  const [draft, setDraft] = useState(/** @type {string | null} */ (null)); // while it is typed
  const isWrong = typeof value !== "number";
  const meant = draft === null ? value : (parse(draft) ?? (takesText ? draft : value));
  /** @param {Event} event */
  const type = (event) => {
    const box = /** @type {HTMLInputElement} */ (event.target);
    const number = parse(box.value);
    setDraft(box.value);
    box.setCustomValidity(number === null ? allowed : "");
    if (number !== null) onValue(number);
    else if (takesText) onValue(box.value);
  };
  /** @param {Event} event */
  const leave = (event) => {
    const box = /** @type {HTMLInputElement} */ (event.target);
    if (!takesText && draft !== null && parse(draft) === null) box.reportValidity();
    box.setCustomValidity("");
    setDraft(null);
  };
  return html`<input
    id=${`${id}-box`}
    class="ml-box"
    type="text"
    inputmode="decimal"
    autocomplete="off"
    title=${allowed}
    aria-invalid=${isWrong}
    aria-describedby=${`${id}-line`}
    disabled=${rest.disabled}
    value=${draft === null || meant !== value ? inWords(value) : draft}
    onInput=${type}
    onBlur=${leave}
  />`;
}

/**
 * A box of text that counts once it is left, and keeps what is typed whatever is drawn meanwhile.
 *
 * @param {{value: string, onValue: (text: string) => void, box?: {current: HTMLInputElement | null}} & Record<string, any>} props
 */
export function TextBox({ value, onValue, box, ...rest }) {
  const [draft, setDraft] = useState(/** @type {string | null} */ (null)); // while it is typed
  useEffect(() => setDraft(null), [value]);
  return html`<input
    ...${rest}
    ref=${box}
    class="ml-box"
    type="text"
    value=${draft ?? value}
    onInput=${(/** @type {Event} */ event) => setDraft(valueOf(event))}
    onChange=${(/** @type {Event} */ event) => onValue(valueOf(event).trim())}
  />`;
}

/** @param {{id?: string, line: Line | null | undefined, isPast?: boolean, onFields?: (fields: Fields) => void}} props */
export function LineText({ id, line, isPast = false, onFields }) {
  const { text = "", kind = "open", verdict, remedy } = line ?? {};
  const words = [text, verdict?.text, verdict?.detail].filter(Boolean).join("; ");
  return html`<p class=${`ml-line ml-${kind}${isPast ? " ml-past" : ""}`} id=${id} title=${words}>
    ${
      remedy &&
      html`<button type="button" onClick=${() => onFields?.(remedy.fields)}>
        ${remedy.label}
      </button>`
    }
    ${kind !== "open" && html`<span aria-hidden="true">${SYMBOLS[kind]} </span>`}${text}
    ${verdict && html`<${Said} verdict=${verdict} />`}
  </p>`;
}

/** A verdict in words, colour and shape. @param {{verdict: Verdict}} props */
export const Said = ({ verdict: { kind, text, detail } }) =>
  html`<span class=${`ml-said ml-${kind}`} title=${detail}>
    <span aria-hidden="true">${SYMBOLS[kind] ?? ""} </span>${text}
  </span>`;

/**
 * One of a few, as radio buttons in a row.
 *
 * @param {object} props
 * @param {string} props.name
 * @param {string} props.label
 * @param {string} [props.about]
 * @param {(Option & {refused?: string})[]} props.choices
 * @param {any} props.value
 * @param {(value: any) => void} props.onValue
 */
export function Choice({ name, label, about = "", choices, value, onValue }) {
  return html`<fieldset class="ml-choice">
    <legend title=${about}>${label}</legend>
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

/**
 * A choice as a list, with its label.
 *
 * @param {object} props
 * @param {string} props.label
 * @param {string} [props.about]
 * @param {Option[]} props.choices
 * @param {any} props.value one that is not offered is shown all the same
 * @param {boolean} [props.disabled]
 * @param {(value: any) => void} props.onValue
 */
export function Select({ label, about = "", choices, value, disabled = false, onValue }) {
  const id = useId();
  return html`<span class="ml-field" title=${about}>
    <label for=${id}>${label}</label>
    <${List} ...${{ id, about, choices, value, disabled, onValue }} />
  </span>`;
}

/**
 * @param {object} props
 * @param {string} props.id
 * @param {string} props.about
 * @param {Option[]} props.choices
 * @param {any} props.value one that is not offered is shown all the same
 * @param {boolean} [props.disabled]
 * @param {(value: any) => void} props.onValue
 */
function List({ id, about, choices, value, disabled = false, onValue }) {
  const isOffered = choices.some((choice) => choice.value === value);
  const all = isOffered ? choices : [...choices, { value, label: String(value) }];
  return html`<select
    id=${id}
    aria-description=${about || undefined}
    disabled=${disabled}
    value=${String(value)}
    onChange=${(/** @type {Event} */ event) =>
      onValue(all.find((choice) => String(choice.value) === valueOf(event))?.value)}
  >
    ${grouped(all).map(([group, members]) => {
      const options = members.map(
        (choice) =>
          html`<option value=${String(choice.value)} selected=${choice.value === value}>
            ${choice.label}
          </option>`,
      );
      return group ? html`<optgroup label=${group}>${options}</optgroup>` : options;
    })}
  </select>`;
}

/** Neighbours of one group together. @param {Option[]} choices @returns {[string, Option[]][]} */
function grouped(choices) {
  const found = /** @type {[string, Option[]][]} */ ([]);
  for (const choice of choices) {
    const { group = "" } = choice;
    if (found.at(-1)?.[0] === group) found.at(-1)?.[1].push(choice);
    else found.push([group, [choice]]);
  }
  return found;
}

let count = 0;

/** An id for an element and its label. */
export const useId = () => useState(() => `ml-of-label-${(count += 1)}`)[0];

/** @param {{label: string, about?: string, value: boolean, disabled?: boolean, onValue: (value: boolean) => void}} props */
export const Switch = ({ label, about = "", value, disabled = false, onValue }) =>
  html`<label class="ml-switch" title=${about}>
    <input
      type="checkbox"
      checked=${value}
      aria-description=${about || undefined}
      disabled=${disabled}
      onChange=${(/** @type {Event} */ event) =>
        onValue(/** @type {HTMLInputElement} */ (event.target).checked)}
    />
    <span>${label}</span>
  </label>`;

/**
 * A button that keeps the focus while it cannot be pressed, so that keys still reach the panel.
 *
 * @param {object} props
 * @param {string} props.name
 * @param {string} [props.label] for those who cannot see it, where the name alone says too little
 * @param {string} [props.about]
 * @param {string} [props.kind] class
 * @param {boolean} [props.disabled]
 * @param {() => void} props.onPress
 */
export const Button = ({ name, label, about, kind = "", disabled = false, onPress }) =>
  html`<button
    type="button"
    class=${kind}
    title=${about}
    aria-label=${label}
    aria-disabled=${disabled}
    onClick=${() => !disabled && onPress()}
  >
    ${name}
  </button>`;

/** A button that shows and hides what it names. @param {{name: string, opens: string, controls: string, isOpen: boolean, about?: string, onOpen: (isOpen: boolean) => void}} props */
export const Toggle = ({ name, opens, controls, isOpen, about = "", onOpen }) =>
  html`<button
    type="button"
    class="ml-toggle"
    data-opens=${opens}
    aria-expanded=${isOpen}
    aria-controls=${isOpen ? controls : undefined}
    title=${about}
    onClick=${() => onOpen(!isOpen)}
  >
    ${name}
  </button>`;

/** The index of the value that is nearest. @param {number[]} values @param {number} value */
export function nearest(values, value) {
  let found = 0;
  values.forEach((one, at) => {
    if (Math.abs(one - value) < Math.abs(values[found] - value)) found = at;
  });
  return found;
}
