/**
 * The panel: settings, whether they fit, the picture of their memory, runs. It is the same for a
 * kernel and for a saved page, which has less.
 *
 * @typedef {import("./kernel.js").Source} Source
 * @typedef {import("./screen.js").Screen} Screen
 */

import { Advice, Alerts, Answer } from "./answer.js";
import { Toggle } from "./controls.js";
import { Controls, Options } from "./form.js";
import { Head } from "./header.js";
import { PANES } from "./panes.js";
import { Picture } from "./picture.js";
import { RunBar, canRun } from "./run_bar.js";
import { RunsTable } from "./runs_table.js";
import { useScreen } from "./screen.js";
import { html, useEffect, useRef, useState } from "./vendor/preact.js";

/** @param {{source: Source, children?: any}} props */
export function Panel({ source, children }) {
  const [, redraw] = useState(0);
  useEffect(() => source.subscribe(() => redraw((count) => count + 1)), [source]);
  const screen = useScreen(source);
  const panes = usePanes(source);
  const root = useRef(/** @type {HTMLElement | null} */ (null));
  useShortcuts(root);
  const { isLive, answer, isCurrent } = source;
  return html`<article
    ref=${root}
    class=${`ml${isLive ? " ml-live" : ""}`}
    data-current=${isCurrent}
    data-exact=${isCurrent && answer.exact}
    onKeyDown=${(/** @type {KeyboardEvent} */ event) => onKey(event, source, screen, panes)}
  >
    <${Head} ...${{ source, screen, panes }} />
    <${Alerts} source=${source} />
    <${Answer} ...${{ source, screen, panes }} />
    ${isLive && html`<${Advice} ...${{ source, screen }} />`}
    <div class="ml-body">
      <div class="ml-left">
        <${Controls} ...${{ source, screen }} />
        ${isLive && html`<${RunBar} ...${{ source, screen }} />`}
      </div>
      <${Picture} ...${{ source, screen }} />
    </div>
    ${isLive && html`<${Drawers} ...${{ source, screen, panes }} />`}
    ${source.runs && html`<${RunsTable} ...${{ source, screen }} />`} ${children}
  </article>`;
}

/** @typedef {{all: string[], isOpen: (name: string) => boolean, open: (name: string, isOpen: boolean) => void}} Panes */

/** Which panes are open, of which the kernel is told. @param {Source} source @returns {Panes} */
function usePanes(source) {
  const [all, setAll] = useState(/** @type {string[]} */ ([]));
  const open = (/** @type {string} */ name, /** @type {boolean} */ isOpen) => {
    const now = [...all.filter((other) => other !== name), ...(isOpen ? [name] : [])];
    setAll(now);
    const ofKernel = now.filter((each) => each in PANES && each !== "help");
    source.tell({ type: "open", by: source.id, panes: ofKernel });
  };
  return { all, isOpen: (name) => all.includes(name), open };
}

/** What can be opened, in the order on the page. @param {Source} source @returns {[string, string][]} names and labels */
const drawersOf = ({ form }) => [
  ["more", form.moreLabel],
  ["ranks-options", form.ranksLabel],
  ["fit", "what fits"],
  ...(form.base ? [/** @type {[string, string]} */ (["base", `what ${form.base} saves`])] : []),
  ["peak", "what holds the peak"],
  ["ranks", "what each rank holds"],
];

/** Options and panes, each a click away. @param {{source: Source, screen: Screen, panes: Panes}} props */
function Drawers({ source, screen, panes }) {
  const drawers = drawersOf(source);
  return html`<section class="ml-drawers" aria-label="More">
    <div class="ml-drawer-names">
      ${drawers.map(
        ([name, label]) =>
          html`<${Toggle}
            name=${label}
            opens=${name}
            controls=${`${source.id}-pane-${name}`}
            isOpen=${panes.isOpen(name)}
            onOpen=${(/** @type {boolean} */ isOpen) => panes.open(name, isOpen)}
          />`,
      )}
    </div>
    ${[...drawers, ["evidence", "evidence"], ["cards", "cards"], ["code", "code"], ["help", "help"]]
      .filter(([name]) => panes.isOpen(name))
      .map(
        ([name, label]) =>
          html`<${Drawer} key=${name} ...${{ source, screen, panes, name, label }} />`,
      )}
  </section>`;
}

/** @type {Record<string, [string, "more" | "optimizer" | "ranks"][]>} */
const OPTIONS = {
  more: [
    ["Optimizer", "optimizer"],
    ["Recompute, loss, offload and others", "more"],
  ],
  "ranks-options": [["", "ranks"]],
};

/** @param {{source: Source, screen: Screen, panes: Panes, name: string, label: string}} props */
function Drawer({ source, screen, panes, name, label }) {
  const root = useRef(/** @type {HTMLElement | null} */ (null));
  useEffect(() => {
    if (name !== "fit") root.current?.scrollIntoView?.({ block: "nearest" }); // opened from above
  }, []);
  const pane = source.panes[name];
  let inside = html`<p class="ml-quiet">looking at it</p>`;
  if (name in OPTIONS)
    inside = html`<${Options} ...${{ source, screen, places: OPTIONS[name] }} />`;
  else if (pane || name === "help") inside = html`<${PANES[name]} ...${{ source, pane }} />`;
  return html`<section
    ref=${root}
    id=${`${source.id}-pane-${name}`}
    class=${`ml-pane ml-pane-${name}`}
    data-pane=${name}
    aria-label=${label}
  >
    <button
      type="button"
      class="ml-close"
      aria-label=${`close ${label}`}
      onClick=${() => panes.open(name, false)}
    >
      ✕
    </button>
    ${inside}
  </section>`;
}

const IN_BOX = "input[type=text], textarea";

/** @param {KeyboardEvent} event @param {Source} source @param {Screen} screen @param {Panes} panes */
function onKey(event, source, screen, panes) {
  const { store, job, isLive } = source;
  const target = /** @type {HTMLElement} */ (event.target);
  const isCommand = event.ctrlKey || event.metaKey;
  if (!isCommand && !event.altKey) event.stopPropagation(); // a notebook has its own keys
  if (isCommand && event.key.toLowerCase() === "z" && !target.matches(IN_BOX)) {
    event.preventDefault();
    event.stopPropagation();
    if (event.shiftKey) store.redo();
    else store.undo();
  } else if (event.key === "Enter" && isLive && target.matches(".ml-row input, .ml-main input")) {
    event.preventDefault();
    if (canRun(source, screen)) source.tell({ type: "run" });
  } else if (event.key === "Escape" && isLive) {
    const name = target.closest(".ml-pane")?.getAttribute("data-pane") ?? panes.all.at(-1);
    if (job.running && !job.byCell) source.tell({ type: "stop" });
    else if (name) {
      panes.open(name, false);
      // what had the focus may be gone
      const toggle = target.closest(".ml")?.querySelector(`[data-opens="${name}"]`);
      /** @type {HTMLElement | null | undefined} */ (toggle)?.focus();
    }
  }
}

/**
 * Keeps a notebook's shortcuts from keys that are pressed in the panel. JupyterLab asks for this
 * attribute before the page sees the key; keys with Ctrl stay the notebook's, but for undo.
 *
 * @param {{current: HTMLElement | null}} root
 */
function useShortcuts(root) {
  useEffect(() => {
    /** @param {KeyboardEvent} event */
    const before = (event) => {
      if (!root.current?.contains(/** @type {Node} */ (event.target))) return;
      const isTheirs = (event.ctrlKey || event.metaKey || event.altKey) && !/^z$/i.test(event.key);
      root.current.dataset.lmSuppressShortcuts = String(!isTheirs);
    };
    if (root.current) root.current.dataset.lmSuppressShortcuts = "true";
    window.addEventListener("keydown", before, true);
    return () => window.removeEventListener("keydown", before, true);
  }, []);
}
