/**
 * The first row: what is trained, where, and within which limit.
 *
 * @typedef {import("./kernel.js").Source} Source
 * @typedef {import("./screen.js").Screen} Screen
 */

import { lineOf } from "./answer.js";
import { Button, LineText, Select, TextBox, Toggle, useId, valueOf } from "./controls.js";
import { html, useEffect, useRef, useState } from "./vendor/preact.js";
import { formatBytes } from "./words.js";

const OTHER = "other"; // a device of which only the memory is known
const FIT =
  "move the sliders to the fastest setting that fits the limit, by prediction: the batch size and " +
  "what you chose stay, memory budget and accumulation are searched anew";

/**
 * @param {{source: Source, screen: Screen, panes: {isOpen: (name: string) => boolean,
 *     open: (name: string, isOpen: boolean) => void}}} props
 */
export function Head({ source, screen, panes }) {
  const { store, answer, job, isLive, trouble } = source;
  return html`<header class="ml-head">
    ${
      isLive
        ? html`<${Workload} source=${source} /><${Device} source=${source} />`
        : html`<h2>${answer.workload}</h2>
            <span>${answer.where}</span>`
    }
    <${Limit} source=${source} screen=${screen} />
    ${
      isLive &&
      html`<${Button}
        name="Fit for me"
        about=${FIT}
        disabled=${job.running || trouble === "gone"}
        onPress=${() => {
          panes.open("fit", true);
          source.tell({ type: "fit" });
        }}
      />`
    }
    <${Button} name="Undo" disabled=${!store.past.length} onPress=${() => store.undo()} />
    <${Button} name="Redo" disabled=${!store.future.length} onPress=${() => store.redo()} />
    ${
      isLive &&
      html`<span class="ml-tools">
        ${["code", "cards", "help"].map(
          (name) =>
            html`<${Toggle}
              name=${name === "help" ? "?" : name}
              opens=${name}
              about=${ABOUT[name]}
              controls=${`${source.id}-pane-${name}`}
              isOpen=${panes.isOpen(name)}
              onOpen=${(/** @type {boolean} */ isOpen) => panes.open(name, isOpen)}
            />`,
        )}
      </span>`
    }
  </header>`;
}

/** @type {Record<string, string>} */
const ABOUT = {
  code: "the step on screen as code",
  cards: "this setting on several cards, side by side",
  help: "how to read this panel, and what each setting saves",
};

/** @param {{source: Source}} props */
const Workload = ({ source: { store, catalog } }) =>
  html`<${Select}
    label="Workload"
    about=${catalog.tooltips.workload}
    choices=${catalog.workloads}
    value=${store.state.fields.workload}
    onValue=${(/** @type {string} */ workload) => store.move({ workload })}
  />`;

/** @param {{source: Source}} props */
function Device({ source: { store, catalog } }) {
  const { device } = store.state.fields;
  const isListed = catalog.devices.some(({ value }) => value === device && value !== OTHER);
  const [isAsked, ask] = useState(false); // "other" is chosen, and its memory not typed yet
  const box = useRef(/** @type {HTMLInputElement | null} */ (null));
  const id = useId();
  useEffect(() => ask(false), [device]);
  useEffect(() => (isAsked ? box.current?.focus() : undefined), [isAsked]);
  const isOther = isAsked || !isListed;
  const choose = (/** @type {string} */ value) => {
    ask(value === OTHER);
    if (value !== OTHER) store.move({ device: value });
  };
  return html`<${Select}
      label="On"
      about=${catalog.tooltips.device}
      choices=${catalog.devices}
      value=${isOther ? OTHER : device}
      onValue=${choose}
    />
    ${
      isOther &&
      html`<span class="ml-field" title="the memory of the card, such as 24 GiB">
        <label for=${id}>Memory</label>
        <${TextBox}
          box=${box}
          id=${id}
          placeholder="24 GiB"
          value=${isListed || device === OTHER ? "" : device}
          onValue=${(/** @type {string} */ text) => text && store.move({ device: text })}
        />
      </span>`
    }`;
}

/** The limit; "8" is asked back as 8 GiB. @param {{source: Source, screen: Screen}} props */
function Limit({ source, screen: { limit } }) {
  const { store, answer, isLive } = source;
  const setLimit = (/** @type {string} */ memory_limit) => store.move({ memory_limit });
  const line = isLive ? null : lineOf(limit); // with a kernel it stands in a row of its own
  return html`<label title=${source.catalog.tooltips.memory_limit}>
      Limit
      <input
        class="ml-box"
        type="text"
        autocomplete="off"
        value=${store.state.fields.memory_limit ?? ""}
        placeholder=${answer.usableBytes ? formatBytes(answer.usableBytes) : "none"}
        aria-invalid=${Boolean(limit.problem)}
        title=${answer.usableWords}
        onInput=${(/** @type {Event} */ event) => setLimit(valueOf(event))}
      />
    </label>
    ${
      line &&
      html`<span role="alert"
        ><${LineText}
          line=${line}
          onFields=${(/** @type {Record<string, any>} */ fields) => store.move(fields)}
      /></span>`
    }`;
}
