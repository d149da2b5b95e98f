/** The timeline of a step with its switches, and the modules that hold the memory at an instant. */

/**
 * @typedef {import("./estimate.js").Estimate} Estimate
 * @typedef {import("./recorded_step.js").RecordedStep} Step
 * @typedef {import("./modules.js").ModuleBytes} ModuleBytes
 * @typedef {import("./store.js").Store} Store
 * @typedef {import("./kernel.js").Source} Source
 * @typedef {import("./screen.js").Screen} Screen
 * @typedef {import("./timeline_picture.js").Scene} Scene
 * @typedef {{total: Float64Array}} Timed
 */

import { CATEGORY_STYLES, inkOn, moduleColour } from "./colours.js";
import { Choice, Select } from "./controls.js";
import { choicesOf, compare, differenceWords, settingWords, useCompared } from "./compared.js";
import { alignedWith, instantAlike } from "./measured.js";
import { BlockModules, isWithin, patternOf } from "./modules.js";
import { highest } from "./numbers.js";
import { CATEGORIES, PHASES } from "./recorded_step.js";
import { TimelineChart } from "./timeline_chart.js";
import { html, useEffect, useMemo, useRef } from "./vendor/preact.js";
import { useWidth } from "./width.js";
import { formatBytes, formatPercent } from "./words.js";

const MOST_GROUPS = 10;
const LEAST_SHARE = 0.004; // of a row of the module map; less is not drawn
const LEVELS = 5;
const WIDEST_MAP = 1900;
const LEAST_TARGET = 26; // pixels
const MIXED = "#b9b9bf"; // modules of several groups
const NO_MODULES = {
  estimate:
    "an estimate from another number of micro-batches or another budget does not know the modules",
  result: "of this step the memory is known by kind, not by module",
};
const NO_TIMELINE = "the memory of this step is not known instant by instant";
/** @type {Record<string, string>} */
const LABELS = { measured: "Measured memory", recorded: "Recorded memory" };

/** @param {{source: Source, screen: Screen}} props */
export function Picture({ source, screen }) {
  if (screen.shown?.found.timeline.total.length)
    return html`<${Timeline} ...${{ source, screen, ...screen.shown }} />`;
  return html`<section class="ml-picture" aria-label="Memory over the step">
    <div class="ml-picture-tools">Memory</div>
    <div class="ml-one">
      <div class="ml-chart ml-nothing"><p>${screen.why || NO_TIMELINE}</p></div>
    </div>
  </section>`;
}

/**
 * @param {{source: Source, screen: Screen, step: Step | null, found: Estimate}} props
 */
function Timeline({ source, screen, step, found }) {
  const { store } = source;
  const { limitBytes, why, before } = screen;
  const { view: wanted, instant, module } = store.state;
  const [now, then] = [useRef(NO_CHART), useRef(NO_CHART)];
  const compared = useCompared(source, screen);
  const other = compared?.found ?? null;
  const both = other ? [{ step, found }, other] : [{ step, found }];
  const without = both.find((one) => !one.step || !one.found.trace);
  const noModules = without && (without.step ? NO_MODULES.estimate : NO_MODULES.result);
  const names = useMemo(
    () => (step && found.trace ? BlockModules.of(step).groupNames(found, MOST_GROUPS) : []),
    [step, found],
  );
  const ran = why ? null : source.ran(store.state.fields);
  const measured = useLine(ran, found);
  const otherMeasured = useLine(compared?.measured, other?.found);
  const isMoved = !why && before && before.found !== found;
  const shared = {
    ...{ view: noModules ? "category" : wanted, limitBytes },
    scale: useScale(found, other?.found, [
      isMoved && before.found.timeline,
      measured,
      otherMeasured,
    ]),
  };
  const [toOther, toThis] = useAlike(found, other?.found ?? null);
  useEffect(() => now.current?.select(instant), [instant]);
  useEffect(() => {
    const own = then.current?.selected ?? null;
    // of several instants that are like the chosen one it keeps its own
    if (own === null || toThis(own) !== instant) then.current?.select(toOther(instant));
  }, [instant, toOther, toThis]);

  const at = Math.min(
    instant ?? found.timeline.total.indexOf(found.peakBytes),
    found.timeline.total.length - 1,
  );
  const here = reading(step, found, at);
  return html`<section class="ml-picture" aria-label="Memory over the step">
    <${Tools} ...${{ source, label: LABELS[found.how] ?? "Memory", view: shared.view, noModules }}>
      ${!other && html`<${Save} chart=${now} name="step" />`}
    <//>
    <div class=${`ml-charts${other ? " ml-two" : ""}`}>
      ${
        other &&
        html`<${Chart}
          key="then"
          ...${{ ...shared, ...other, chart: then, measured: otherMeasured }}
          names=${compared?.isOfModel ? names : null}
          name=${compared?.name}
          about=${compared?.about}
          onSelect=${(/** @type {number} */ own) => store.look({ instant: toThis(own) })}
          onPoint=${(/** @type {number | null} */ own) => now.current?.follow(toThis(own))}
        />`
      }
      <${Chart}
        key="now"
        ...${{ ...shared, step, found, names, measured, chart: now, dimmed: why }}
        before=${isMoved && !store.state.isWithBefore ? before.found.timeline : null}
        name=${other ? "on screen" : ""}
        about=${settingWords(found.setting)}
        onSelect=${(/** @type {number} */ chosen) => store.look({ instant: chosen })}
        onPoint=${(/** @type {number | null} */ own) => then.current?.follow(toOther(own))}
      />
    </div>
    ${other && !why && html`<${Difference} ...${{ compared, step, found, ran }} />`}
    <p class=${`ml-reading${why ? " ml-past" : ""}`}>
      <b>${instant === null ? "at the peak: " : ""}${here.title}</b> ${here.lines.join(" ")}
    </p>
    ${
      step && found.trace
        ? html`<${ModuleMap} ...${{ store, step, found, names, at, module, isPast: why !== "" }} />`
        : html`<p class="ml-quiet">${step ? NO_MODULES.estimate : NO_MODULES.result}.</p>`
    }
  </section>`;
}

/** What stands above the picture. @param {{source: Source, label: string, view: string, noModules: string | undefined, children: any}} props */
function Tools({ source, label, view, noModules, children }) {
  const views = [
    { value: "category", label: "by kind" },
    { value: "module", label: "by module", refused: noModules ?? "" },
  ];
  const { choices, value } = choicesOf(source);
  return html`<div class="ml-picture-tools">
    <${Choice}
      name=${`${source.id}-view`}
      label=${label}
      choices=${views}
      value=${view}
      onValue=${(/** @type {"category" | "module"} */ chosen) => source.store.look({ view: chosen })}
    />
    ${
      choices.length > 0 &&
      html`<${Select}
        label="compare with"
        about="another run, or the settings before the last move, in a second picture on the same scale"
        choices=${choices}
        value=${value}
        onValue=${(/** @type {number | string} */ chosen) => compare(source, chosen)}
      />`
    }
    ${children}
  </div>`;
}

/** @type {TimelineChart | null} */
const NO_CHART = null;

/**
 * A timeline as a chart, with its name if it is one of two.
 *
 * @param {object} props
 * @param {{current: TimelineChart | null}} props.chart is set
 * @param {Step | null} props.step
 * @param {Estimate} props.found
 * @param {string} props.view
 * @param {string[] | null} props.names of the groups of modules; null for its own
 * @param {string} props.name
 * @param {string} props.about its settings
 * @param {number | null} props.limitBytes
 * @param {Scene["scale"]} props.scale
 * @param {Scene["measured"]} props.measured
 * @param {Scene["before"]} [props.before]
 * @param {string} [props.dimmed]
 * @param {(instant: number) => void} props.onSelect
 * @param {(instant: number | null) => void} props.onPoint
 */
function Chart({ chart, step, found, view, names, name, about, onSelect, onPoint, ...lines }) {
  const { limitBytes, scale, measured, before = null, dimmed = "" } = lines;
  const root = useRef(/** @type {HTMLDivElement | null} */ (null));
  const callbacks = useRef({ onSelect, onPoint });
  callbacks.current = { onSelect, onPoint };
  const groups = useMemo(() => groupsOf(step, found, view, names), [step, found, view, names]);
  useEffect(() => {
    if (!root.current) return undefined;
    const made = new TimelineChart(root.current, {
      onSelect: (instant) => callbacks.current.onSelect(instant),
      onPoint: (instant) => callbacks.current.onPoint(instant),
    });
    chart.current = made;
    return () => {
      made.destroy();
      chart.current = null;
    };
  }, []);
  useEffect(() => {
    chart.current?.show({
      ...{
        timeline: found.timeline,
        groups,
        limitBytes,
        scale,
        before,
        measured,
        dimmed,
      },
      describe: (instant) => reading(step, found, instant),
      label: labelOf(found, limitBytes, name && `${name}: ${about}. `),
    });
  }, [found, groups, limitBytes, scale, before, measured, dimmed, name, about]);
  return html`<div class="ml-one">
    ${
      name &&
      html`<p class="ml-chart-name">
        <span title=${`${name}: ${about}`}><b>${name}:</b> ${about}</span>
        <${Save} chart=${chart} name=${name} />
      </p>`
    }
    <div class="ml-chart" ref=${root}></div>
  </div>`;
}

/** What makes the difference of two peaks. @param {{compared: import("./compared.js").Compared, step: Step | null, found: Estimate, ran: Estimate | null}} props */
function Difference({ compared, step, found, ran }) {
  const { title, text } = useMemo(
    () => differenceWords(compared, { step, found }, ran, MOST_GROUPS),
    [compared, step, found, ran],
  );
  return html`<p class="ml-difference"><b>${title}</b> ${text}</p>`;
}

/** One scale for two pictures, from all lines in them; null for one picture. @param {Estimate} found @param {Estimate | undefined} other @param {(Timed | false | null | undefined)[]} lines */
function useScale(found, other, lines) {
  const kept = useRef({ top: 0 });
  const totals = lines.map((line) => (line ? highest(line.total) : 0));
  const bytes = other ? Math.max(found.peakBytes, other.peakBytes, ...totals) : 0;
  return useMemo(() => (bytes ? { bytes, kept: kept.current } : null), [bytes]);
}

/** Which instant of one step is like one of the other, both ways. @param {Estimate} found @param {Estimate | null} other */
function useAlike(found, other) {
  return useMemo(() => {
    /** @param {Estimate} from @param {Estimate} to */
    const between = (from, to) => (/** @type {number | null} */ instant) =>
      instant === null ? null : instantAlike(from.timeline, to.timeline, instant);
    return other ? [between(found, other), between(other, found)] : [() => null, () => null];
  }, [found, other]);
}

/** The measured line over a picture; null if there is none, or if it is the picture. @param {Estimate | null | undefined} ran @param {Estimate | undefined} found */
function useLine(ran, found) {
  return useMemo(
    () => (ran && found && ran !== found ? alignedWith(ran.timeline, found.timeline) : null),
    [ran, found],
  );
}

/** @param {Step | null} step @param {Estimate} found @param {string} view @param {string[] | null} names of groups */
function groupsOf(step, found, view, names) {
  if (step && view === "module") {
    const modules = BlockModules.of(step);
    return modules
      .groups(found, names ?? modules.groupNames(found, MOST_GROUPS))
      .map(({ path, held }, index) => ({
        name: path,
        label: path || "the model itself",
        colour: moduleColour(index),
        pattern: /** @type {""} */ (""),
        held,
      }));
  }
  return CATEGORY_STYLES.map((style) => ({
    ...style,
    held: found.timeline.held[CATEGORIES.indexOf(style.name)],
  }));
}

/** What is allocated at an instant, and where in the step that is. @param {Step | null} step @param {Estimate} found @param {number} instant */
export function reading(step, found, instant) {
  const { timeline } = found;
  const phase = PHASES[timeline.phase[instant]];
  const count = timeline.microBatch[timeline.microBatch.length - 1] + 1;
  let title = phase;
  if (phase !== "optimizer" && count > 1)
    title += ` of micro-batch ${timeline.microBatch[instant] + 1}`;
  const where = placeOf(step, found, instant);
  if (where.module) title += `, in ${where.module}`;
  if (where.operator) title += ` (${where.operator})`;
  const parts = CATEGORIES.map((name, at) => ({ name, bytes: timeline.held[at][instant] }))
    .filter(({ bytes }) => bytes > 0)
    .sort((one, other) => other.bytes - one.bytes)
    .map(({ name, bytes }) => `${formatBytes(bytes)} ${name.replace("_", " ")}`);
  return {
    title,
    lines: [`${formatBytes(timeline.total[instant])} allocated`, `= ${parts.join(" + ")}`],
  };
}

/** @param {Step | null} step @param {Estimate} found @param {number} instant */
function placeOf(step, found, instant) {
  if (!step || !found.trace) {
    const { timeline, peakBytes, peakPlace } = found;
    const isPeak = instant === timeline.total.indexOf(peakBytes);
    return (isPeak && peakPlace) || { module: "", operator: "" };
  }
  const { header, arrays } = step;
  const row = found.trace.row[found.firstEvent + instant];
  const operator = arrays.row_operator[row] - 1;
  const module = header.modules[arrays.operator_module[operator]] ?? "";
  return { module, operator: header.operators[arrays.operator_name[operator]] ?? "" };
}

/** The picture in words, for those who cannot see it. @param {Estimate} found @param {number | null} limit @param {string} which of two */
function labelOf(found, limit, which) {
  const peak = found.timeline.total.indexOf(found.peakBytes);
  const phase = PHASES[found.timeline.phase[Math.max(peak, 0)]];
  const of = limit === null ? "" : `, limit ${formatBytes(limit)}`;
  return `${which}Allocated memory over a step: peak ${formatBytes(found.peakBytes)} in ${phase}${of}. Arrow keys read it.`;
}

/** @param {Blob} blob @param {string} name */
function save(blob, name) {
  const link = document.createElement("a");
  link.href = URL.createObjectURL(blob);
  link.download = name;
  link.click();
  setTimeout(() => URL.revokeObjectURL(link.href), 1000);
}

/** Saves a text as a file. @param {string} text @param {string} kind @param {string} name */
export const saveText = (text, kind, name) => save(new Blob([text], { type: kind }), name);

/** @param {{chart: {current: TimelineChart | null}, name: string}} props name of the files */
function Save({ chart, name }) {
  const png = async () => {
    const blob = await chart.current?.toPng();
    if (blob) save(blob, `${name}.png`);
  };
  const text = (
    /** @type {string | undefined} */ content,
    /** @type {string} */ kind,
    /** @type {string} */ ending,
  ) => {
    if (content) saveText(content, kind, `${name}.${ending}`);
  };
  return html`<span class="ml-tools">
    <span>save</span>
    <button type="button" onClick=${png}>PNG</button>
    <button type="button" onClick=${() => text(chart.current?.toSvg(), "image/svg+xml", "svg")}>
      SVG
    </button>
    <button type="button" onClick=${() => text(chart.current?.toCsv(), "text/csv", "csv")}>
      CSV
    </button>
  </span>`;
}

/**
 * The modules at an instant as an icicle: each row divides the one above it.
 *
 * @param {{store: Store, step: Step, found: Estimate, names: string[], at: number, module: string | null, isPast: boolean}} props names of groups
 */
function ModuleMap({ store, step, found, names, at, module, isPast }) {
  const tree = useMemo(() => BlockModules.of(step).tree(found, at), [step, found, at]);
  const [root, width] = useWidth(WIDEST_MAP);
  const top = nodeAt(tree, module) ?? tree;
  const rows = levels(top);
  const path = top.path ? top.path.split(".") : [];
  return html`<div class=${`ml-modules${isPast ? " ml-past" : ""}`} ref=${root}>
    <p>
      <b>who holds it</b>${" "}
      <button type="button" disabled=${!top.path} onClick=${() => store.look({ module: null })}>
        the model
      </button>
      ${path.map((name, depth) => {
        const here = path.slice(0, depth + 1).join(".");
        return html` ›
          <button
            type="button"
            disabled=${here === top.path}
            onClick=${() => store.look({ module: here })}
          >
            ${name}
          </button>`;
      })}
      <span class="ml-quiet"> ${formatBytes(top.bytes)} at this instant</span>
    </p>
    ${rows.map(
      (row) =>
        html`<div class="ml-level">
          ${row.map((cell) => {
            if (!cell.node) return html`<span style=${{ flex: `${cell.share} 1 0` }}></span>`;
            return html`<${ModuleCell} ...${{ store, cell, width, names, top }} />`;
          })}
        </div>`,
    )}
  </div>`;
}

/** A cell; one that is too narrow to be hit is no button. @param {{store: Store, cell: {node: ModuleBytes, share: number}, width: number, names: string[], top: ModuleBytes}} props */
function ModuleCell({ store, cell: { node, share }, width, names, top }) {
  const background = colourOf(node.path, names);
  const words = `${node.path}: ${formatBytes(node.bytes)}, ${formatPercent(node.bytes / Math.max(top.bytes, 1))}`;
  const style = { flex: `${share} 1 0`, background, color: inkOn(background) };
  if (share * width < LEAST_TARGET) {
    return html`<span class="ml-cell" title=${words} style=${style}></span>`;
  }
  return html`<button
    type="button"
    class="ml-cell"
    title=${words}
    aria-label=${words}
    style=${style}
    onClick=${() => store.look({ module: node.path })}
  >
    ${node.name}
  </button>`;
}

/** The colour that a module has in the timeline; grey for one of several groups. @param {string} path @param {string[]} names */
function colourOf(path, names) {
  const pattern = patternOf(path);
  const index = names.findIndex((name) => isWithin(pattern, name));
  const isWhole = !names.some((name) => name !== names[index] && isWithin(name, pattern));
  return isWhole && names[index] !== "" ? moduleColour(index) : MIXED;
}

/** @param {ModuleBytes} node @param {string | null} path @returns {ModuleBytes | null} */
function nodeAt(node, path) {
  if (path === null || node.path === path) return node;
  for (const part of node.parts) {
    const found =
      path === part.path || path.startsWith(`${part.path}.`) ? nodeAt(part, path) : null;
    if (found) return found;
  }
  return null;
}

/**
 * Rows of cells that lie under one another; a cell without node is a gap.
 *
 * @param {ModuleBytes} top
 */
function levels(top) {
  /** @typedef {{node: ModuleBytes | null, share: number}} Cell */
  /** @type {Cell[][]} */
  const rows = [];
  /** @type {Cell[]} */
  let row = [{ node: top, share: 1 }];
  while (rows.length < LEVELS) {
    /** @type {Cell[]} */
    const below = [];
    for (const { node, share } of row) {
      let left = share;
      node?.parts.forEach((part) => {
        const own = (share * part.bytes) / Math.max(node.bytes, 1);
        if (own < LEAST_SHARE) return;
        below.push({ node: part, share: own });
        left -= own;
      });
      if (left > 1e-6) below.push({ node: null, share: left });
    }
    if (!below.some((cell) => cell.node)) break;
    rows.push(below);
    row = below;
  }
  return rows;
}
