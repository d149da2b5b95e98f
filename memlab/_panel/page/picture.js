/** The timeline of a step with its switches, and the modules that hold the memory at an instant. */

/**
 * @typedef {import("./estimate.js").Estimate} Estimate
 * @typedef {import("./recorded_step.js").RecordedStep} Step
 * @typedef {import("./modules.js").ModuleBytes} ModuleBytes
 * @typedef {import("./store.js").Store} Store
 * @typedef {import("./kernel.js").Source} Source
 * @typedef {import("./screen.js").Screen} Screen
 */

import { CATEGORY_STYLES, inkOn, moduleColour } from "./colours.js";
import { Choice } from "./controls.js";
import { alignedWith, byEvent } from "./measured.js";
import { BlockModules, isWithin, patternOf } from "./modules.js";
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

/** @type {WeakMap<Step, BlockModules>} */
const known = new WeakMap();

/** @param {Step} step */
function modulesOf(step) {
  const modules = known.get(step) ?? new BlockModules(step);
  known.set(step, modules);
  return modules;
}

/** @param {{source: Source, screen: Screen}} props */
export function Picture({ source, screen }) {
  if (screen.shown?.found.timeline.total.length)
    return html`<${Timeline} ...${{ source, screen, ...screen.shown }} />`;
  return html`<section class="ml-picture" aria-label="Memory over the step">
    <div class="ml-picture-tools">Memory</div>
    <div class="ml-chart ml-nothing"><p>${screen.why || NO_TIMELINE}</p></div>
  </section>`;
}

/**
 * @param {{source: Source, screen: Screen, step: Step | null, found: Estimate}} props
 */
function Timeline({ source, screen, step, found }) {
  const { store } = source;
  const { limitBytes, why, before } = screen;
  const root = useRef(/** @type {HTMLDivElement | null} */ (null));
  const chart = useRef(/** @type {TimelineChart | null} */ (null));
  const { view: wanted, instant, module } = store.state;
  const view = step && found.trace ? wanted : "category";
  const noModules = step ? NO_MODULES.estimate : NO_MODULES.result;
  const groups = useMemo(() => groupsOf(step, found, view), [step, found, view]);
  const peak = found.timeline.total.indexOf(found.peakBytes);
  const at = Math.min(instant ?? peak, found.timeline.total.length - 1);
  const { measured, compared } = useLines(source, screen, found);

  useEffect(() => {
    if (!root.current) return undefined;
    const made = new TimelineChart(root.current, {
      onSelect: (/** @type {number | null} */ chosen) => store.look({ instant: chosen }),
    });
    chart.current = made;
    return () => made.destroy();
  }, []);
  useEffect(() => {
    chart.current?.show({
      timeline: found.timeline,
      groups,
      limitBytes,
      before: !why && before && before.found !== found ? before.found.timeline : null,
      measured,
      compared,
      dimmed: why,
      describe: (instantOf) => reading(step, found, instantOf),
      label: labelOf(found, limitBytes),
    });
  }, [found, groups, limitBytes, why, before, measured, compared]);
  useEffect(() => chart.current?.select(instant), [instant]);

  const views = [
    { value: "category", label: "by kind" },
    { value: "module", label: "by module", refused: found.trace ? "" : noModules },
  ];
  const here = reading(step, found, at);
  return html`<section class="ml-picture" aria-label="Memory over the step">
    <div class="ml-picture-tools">
      <${Choice}
        name=${`${source.id}-view`}
        label=${LABELS[found.how] ?? "Memory"}
        choices=${views}
        value=${view}
        onValue=${(/** @type {"category" | "module"} */ value) => store.look({ view: value })}
      />
      <${Save} chart=${chart} />
    </div>
    <div class="ml-chart" ref=${root}></div>
    <p class=${`ml-reading${why ? " ml-past" : ""}`}>
      <b>${instant === null ? "at the peak: " : ""}${here.title}</b> ${here.lines.join(" ")}
    </p>
    ${
      step && found.trace
        ? html`<${ModuleMap} ...${{ store, step, found, at, module, isPast: why !== "" }} />`
        : html`<p class="ml-quiet">${noModules}.</p>`
    }
  </section>`;
}

/** The measured line of what is on screen, and that of the run it is compared with. @param {Source} source @param {Screen} screen @param {Estimate} found */
function useLines(source, { why }, found) {
  const { store, runs } = source;
  const ran = why ? null : source.ran(store.state.fields);
  const own = ran === found ? null : ran;
  const row = runs?.rows.find(({ isCompared }) => isCompared);
  const comparedRun = row ? source.measured(row.number) : null;
  const other = comparedRun === ran ? null : comparedRun;
  const label = row?.label ?? "";
  return {
    measured: useMemo(() => own && alignedWith(own.timeline, found.timeline), [own, found]),
    compared: useMemo(() => {
      if (!other) return null;
      const line = alignedWith(other.timeline, found.timeline) ?? byEvent(other.timeline);
      return { label, timeline: line };
    }, [other, label, found]),
  };
}

/** @param {Step | null} step @param {Estimate} found @param {"category" | "module"} view */
function groupsOf(step, found, view) {
  if (step && view === "module") {
    return modulesOf(step)
      .groups(found, MOST_GROUPS)
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
    lines: [`${formatBytes(timeline.total[instant])} allocated =`, parts.join(" + ")],
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

/** The picture in words, for those who cannot see it. @param {Estimate} found @param {number | null} limit */
function labelOf(found, limit) {
  const peak = found.timeline.total.indexOf(found.peakBytes);
  const phase = PHASES[found.timeline.phase[Math.max(peak, 0)]];
  const of = limit === null ? "" : `, limit ${formatBytes(limit)}`;
  return `Allocated memory over a step: peak ${formatBytes(found.peakBytes)} in ${phase}${of}. Arrow keys read it.`;
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

/** @param {{chart: {current: TimelineChart | null}}} props */
function Save({ chart }) {
  const png = async () => {
    const blob = await chart.current?.toPng();
    if (blob) save(blob, "step.png");
  };
  const text = (
    /** @type {string | undefined} */ content,
    /** @type {string} */ kind,
    /** @type {string} */ name,
  ) => {
    if (content) saveText(content, kind, name);
  };
  return html`<span class="ml-tools">
    save
    <button type="button" onClick=${png}>PNG</button>
    <button
      type="button"
      onClick=${() => text(chart.current?.toSvg(), "image/svg+xml", "step.svg")}
    >
      SVG
    </button>
    <button type="button" onClick=${() => text(chart.current?.toCsv(), "text/csv", "step.csv")}>
      CSV
    </button>
  </span>`;
}

/**
 * The modules at an instant as an icicle: each row divides the one above it.
 *
 * @param {{store: Store, step: Step, found: Estimate, at: number, module: string | null, isPast: boolean}} props
 */
function ModuleMap({ store, step, found, at, module, isPast }) {
  const tree = useMemo(() => modulesOf(step).tree(found, at), [step, found, at]);
  const names = useMemo(() => modulesOf(step).groupNames(found, MOST_GROUPS), [step, found]);
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
