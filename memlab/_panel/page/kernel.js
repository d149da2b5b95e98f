/**
 * The kernel as a source of the panel: what it says is set and known, and what the page tells it.
 * Everything comes from the traits of an anywidget model, and from files that the page asks for; so
 * a tab that is opened again has all.
 *
 * @typedef {import("./store.js").Fields} Fields
 * @typedef {import("./estimate.js").Estimate} Estimate
 * @typedef {import("./controls.js").Line} Line
 * @typedef {import("./verdict.js").Verdict} Verdict
 *
 * @typedef {{value: any, label: string, group?: string}} Option
 *
 * @typedef {object} ControlOf a setting
 * @property {string} field
 * @property {string} label
 * @property {string} tooltip
 * @property {"slider" | "main" | "more" | "optimizer" | "ranks"} place
 * @property {"number" | "choice" | "switch"} kind
 * @property {Option[]} choices
 * @property {number[]} positions of its slider, ascending; the box takes other numbers too
 *
 * @typedef {object} Catalog
 * @property {string} version
 * @property {Option[]} workloads
 * @property {Option[]} devices
 * @property {ControlOf[]} controls
 * @property {Record<string, string>} tooltips
 * @property {{general: string, heads: string[], rows: string[][]} | null} help
 *
 * @typedef {object} Form
 * @property {{label: string, offered: number[]} | null} size
 * @property {{name: string, label: string, values: Option[], disabled: boolean}[]} choices
 * @property {Option[]} precisions
 * @property {string[]} disabled
 * @property {string} moreLabel
 * @property {string} ranksLabel
 * @property {string | null} base
 * @property {Record<string, string>} own
 *
 * @typedef {object} Answer
 * @property {string} by
 * @property {number} move
 * @property {string} workload
 * @property {string | null} family
 * @property {number[]} steps
 * @property {boolean} exact
 * @property {string} device
 * @property {string} [where] on what, in words; of a page without a kernel
 * @property {number | null} limitBytes
 * @property {number | null} usableBytes
 * @property {string} usableWords
 * @property {boolean} ready
 * @property {boolean} keeps
 * @property {string} why
 * @property {Verdict} fit
 * @property {string} costs
 * @property {"run" | "prediction" | "none"} source
 * @property {number | null} run
 * @property {{run: number, steps: number[]} | null} compared
 * @property {string} note
 * @property {Line | null} advice
 * @property {Record<string, Line>} lines
 * @property {Line | null} more
 * @property {Line | null} optimizer
 * @property {Line | null} ranks
 * @property {Line | null} choices
 * @property {Line | null} size
 * @property {Line | null} about
 * @property {string} divided
 * @property {{title: string, sentence: string} | null} failure
 * @property {{when: string, text: string} | null} printed
 * @property {string} doing
 * @property {{kind: string, text: string, isPast: boolean}} status
 *
 * @typedef {{running: boolean, byCell: string, text: string, fraction: number | null}} Job
 *
 * @typedef {object} Source where the panel has everything from: a kernel, or a saved page
 * @property {boolean} isLive
 * @property {string} id begins the ids of elements
 * @property {import("./store.js").Store} store
 * @property {Catalog} catalog
 * @property {Form} form
 * @property {Answer} answer
 * @property {Job} job
 * @property {import("./runs_order.js").Runs | null} runs
 * @property {Record<string, any>} panes
 * @property {[string, string][]} fixed settings that cannot be changed here
 * @property {"" | "gone" | "silent"} trouble
 * @property {boolean} isCurrent whether the answer is about what is set
 * @property {(fields: Fields) => RecordedStep[]} stepsFor recordings that settings can be computed from
 * @property {(row: import("./runs_order.js").RunRow) => RecordedStep[]} stepsOf recordings that a run
 *     can be computed from; of those that are not compared a kernel tells of none
 * @property {(run: number) => Estimate | null} measured what a run held
 * @property {(fields: Fields) => Estimate | null} ran what the run of these settings held
 * @property {(listener: () => void) => () => void} subscribe
 * @property {(message: Record<string, any>) => void} tell
 * @property {(save: (text: string) => void) => void} askCsv
 * @property {import("./screen.js").Found | null} [first] what is shown before anything else is known
 */

import { heldBy } from "./measured.js";
import { Moves, Outbox } from "./moves.js";
import { RecordedStep } from "./recorded_step.js";
import { familyKey, stepKey, textOf } from "./settings.js";
import { readStepFile } from "./step_file.js";
import { AT_FIRST, Store, different } from "./store.js";

/** @typedef {{get: (name: string) => any, on: (name: string, act: (this: any, ...given: any[]) => void) => void, off: (name: string, act: (...given: any[]) => void) => void, send: (message: any) => void}} Model */

// these take all with them that the kernel does not know, which would come too late
const OF_SETTINGS = ["run", "fit", "use", "compareBase"];
const TRAITS = ["catalog", "form", "asked", "answer", "job", "runs", "panes"];
const ASK_AGAIN_MS = 10_000;
const SILENT_MS = 15_000;
const MOST_KEPT = 200; // families and moves that are remembered
const MOST_RECORDED = 64; // recordings and measured lines, a megabyte each
const MOST_LISTS = 8; // of recordings, which keep these
const DISCONNECTED = "jupyter-widgets-disconnected"; // a class of views that have no kernel

/** @implements {Source} */
export class Kernel {
  isLive = true;
  /** @type {[string, string][]} */
  fixed = [];
  /** @type {"" | "gone" | "silent"} */
  trouble = "";
  /** Recordings by their number. @type {Map<number, RecordedStep>} */
  recorded = new Map();
  /** What runs held; null if it was not measured. @type {Map<number, Estimate | null>} */
  lines = new Map();
  /** The run of some settings. @type {Map<string, number>} */
  runOf = new Map();
  /** When each file was asked for. @type {Map<string, number>} */
  wanted = new Map();
  /** The settings of each move, as text. @type {Map<string, {all: string, family: string, step: string}>} */
  known = new Map();
  /** Numbers of recordings by what estimates take as given. @type {Map<string, number[]>} */
  families = new Map();
  /** @type {Set<() => void>} */
  listeners = new Set();
  /** @type {[string, (...given: any[]) => void][]} */
  handlers = [];

  /** @param {Model} model @param {HTMLElement} el of the widget */
  constructor(model, el) {
    this.model = model;
    this.id = `ml-${Math.random().toString(36).slice(2, 8)}`;
    this.moves = new Moves(this.id);
    this.outbox = new Outbox((fields) => this.tell({ ...this.stamp(), type: "set", fields }));
    this.store = new Store({ ...AT_FIRST, fields: model.get("asked").fields }, (changes) =>
      this.change(changes),
    );
    this.store.subscribe(() => this.changed());
    for (const name of TRAITS) this.on(`change:${name}`, () => this.take(name));
    this.on("msg:custom", (content, buffers) => this.hear(content, buffers));
    const source = this;
    // anywidget's model does not say whether its kernel lives; the view, which is `this`, does
    this.on("comm_live_update", function () {
      source.live(Boolean(this?.model?.comm_live));
    });
    this.note();
    this.need();
    this.tell({ type: "open", by: this.id, panes: [], begins: true });
    if (el.closest(`.${DISCONNECTED}`)) this.trouble = "gone";
  }

  /** @param {string} name @param {(this: any, ...given: any[]) => void} act */
  on(name, act) {
    this.model.on(name, act);
    this.handlers.push([name, act]);
  }

  close() {
    this.outbox.flush();
    this.outbox.clear();
    clearTimeout(this.silence);
    clearTimeout(this.again);
    this.tell({ type: "open", by: this.id, panes: [] });
    for (const [name, act] of this.handlers) this.model.off(name, act);
  }

  get catalog() {
    return this.model.get("catalog");
  }
  get form() {
    return this.model.get("form");
  }
  get answer() {
    return this.model.get("answer");
  }
  get job() {
    const job = this.model.get("job");
    return this.trouble === "gone" ? { ...job, running: false } : job;
  }
  get runs() {
    return this.model.get("runs");
  }
  get panes() {
    return this.model.get("panes") ?? {};
  }

  get isCurrent() {
    const { by, move } = this.answer;
    return this.known.get(`${by}:${move}`)?.all === textOf(this.store.state.fields);
  }

  /** @param {Fields} fields */
  stepsFor(fields) {
    return this.#stepsOf(this.families.get(familyKey(fields)) ?? []);
  }

  /** @param {import("./runs_order.js").RunRow} row */
  stepsOf({ number }) {
    const { compared } = this.answer;
    return this.#stepsOf(compared?.run === number ? compared.steps : []);
  }

  /** @param {number[]} numbers */
  #stepsOf(numbers) {
    const there = numbers.filter((number) => this.recorded.has(number));
    const key = there.join();
    const steps = this.made.get(key) ?? there.map((number) => this.recorded.get(number));
    put(this.made, key, /** @type {RecordedStep[]} */ (steps), MOST_LISTS);
    return /** @type {RecordedStep[]} */ (steps);
  }
  /** Lists of recordings, so that the same are the same list. @type {Map<string, RecordedStep[]>} */
  made = new Map();

  /** @param {number} run */
  measured(run) {
    return this.lines.get(run) ?? null;
  }

  /** @param {Fields} fields */
  ran(fields) {
    return this.measured(this.runOf.get(stepKey(fields)) ?? -1);
  }

  /** @param {() => void} listener */
  subscribe(listener) {
    this.listeners.add(listener);
    return () => this.listeners.delete(listener);
  }

  changed() {
    this.listeners.forEach((listener) => listener());
  }

  // What the page says.

  stamp() {
    return { by: this.id, move: this.moves.number };
  }

  /** @param {Record<string, any>} message */
  tell(message) {
    if (message.type === "open") this.opened = message.panes;
    const takesAll = OF_SETTINGS.includes(message.type);
    if (takesAll) {
      this.outbox.clear();
      this.expect();
    }
    const fields = takesAll ? { ...this.stamp(), fields: this.moves.ofWorkload() } : {};
    try {
      this.model.send({ ...message, ...fields });
    } catch {
      this.trouble = "gone"; // JupyterLab's channel to a kernel that has ended
    }
  }

  /** Panes that are open here. @type {string[]} */
  opened = [];

  /** @param {Fields} changes of a person */
  change(changes) {
    this.moves.make(changes);
    this.remember(this.id, this.moves.number, { ...this.store.state.fields, ...changes });
    this.outbox.add(changes);
    this.expect();
  }

  /** Waits for an answer to what is told. */
  expect() {
    this.isHeard = false;
    clearTimeout(this.silence);
    this.silence = setTimeout(() => this.hearNothing(), SILENT_MS);
  }
  isHeard = true;
  silence = /** @type {any} */ (undefined);

  hearNothing() {
    const isAnswered = this.isHeard && this.moves.confirmed >= this.moves.number;
    if (this.job.running || isAnswered || this.trouble === "gone") return;
    this.trouble = "silent";
    this.goOn();
    this.changed();
  }

  // What the kernel says.

  /** @param {string} trait that is new */
  take(trait) {
    this.isHeard = true;
    if (this.trouble === "silent") this.trouble = "";
    this.note();
    if (trait === "asked") {
      const { by, fields } = this.model.get("asked");
      const set = this.moves.over(fields);
      if (by === this.id) this.store.adopt(set);
      else this.store.receive(set, by);
    }
    this.need();
    this.changed();
  }

  /** Remembers of which settings the kernel speaks, and which recordings they have. */
  note() {
    const [asked, answer] = [this.model.get("asked"), this.answer];
    this.moves.confirm(asked.by, asked.move);
    this.remember(asked.by, asked.move, asked.fields);
    const settings = this.known.get(`${answer.by}:${answer.move}`);
    if (settings && answer.family !== null) put(this.families, settings.family, answer.steps);
    else if (settings) this.families.delete(settings.family);
    if (settings && answer.run !== null) put(this.runOf, settings.step, answer.run);
    else if (settings) this.runOf.delete(settings.step);
  }

  /** @param {string} by @param {number} move @param {Fields} fields */
  remember(by, move, fields) {
    const [all, family, step] = [textOf(fields), familyKey(fields), stepKey(fields)];
    put(this.known, `${by}:${move}`, { all, family, step });
  }

  /** Asks for recordings and measured lines that are not here. */
  need() {
    const now = performance.now();
    const isNew = (/** @type {string} */ name) => {
      if (now - (this.wanted.get(name) ?? -Infinity) < ASK_AGAIN_MS) return false;
      this.wanted.set(name, now);
      return true;
    };
    const { run, compared: other } = this.answer;
    const steps = [...new Set([...this.answer.steps, ...(other?.steps ?? [])])];
    const rows = this.runs?.rows ?? [];
    const compared = rows.filter((/** @type {any} */ row) => row.isCompared);
    const numbers = [run, ...compared.map((/** @type {any} */ row) => row.number)];
    const lacking = {
      steps: steps.filter(
        (/** @type {number} */ id) => !this.recorded.has(id) && isNew(`step ${id}`),
      ),
      runs: numbers.filter((n) => n !== null && !this.lines.has(n) && isNew(`run ${n}`)),
    };
    if (lacking.steps.length || lacking.runs.length) {
      this.tell({ type: "need", ...lacking, csv: false });
      clearTimeout(this.again);
      this.again = setTimeout(() => this.askAgain(), ASK_AGAIN_MS);
    }
  }
  again = /** @type {any} */ (undefined);

  /** Asks for what has not come, since a message can be lost. */
  askAgain() {
    this.wanted.clear();
    this.need();
  }

  /** @param {any} content @param {DataView[]} buffers */
  async hear(content, buffers) {
    this.isHeard = true;
    if (content.type === "step" || content.type === "run") {
      try {
        const file = await readStepFile(bytesOf(buffers[0]));
        const { id } = content;
        if (content.type === "run") put(this.lines, id, heldBy(file), MOST_RECORDED);
        else if (!this.recorded.has(id))
          put(this.recorded, id, new RecordedStep(file), MOST_RECORDED);
      } catch (error) {
        console.error("memlab:", error); // the picture stays dimmed
      }
    } else if (content.type === "views" && content.by !== this.id && this.opened.length) {
      this.tell({ type: "open", by: this.id, panes: this.opened });
    } else if (content.type === "csv") {
      this.save?.(content.text);
      this.save = null;
    }
    this.changed();
  }

  /** Asks for all runs as CSV. @param {(text: string) => void} save */
  askCsv(save) {
    this.save = save;
    this.tell({ type: "need", steps: [], runs: [], csv: true });
  }
  /** @type {((text: string) => void) | null} */
  save = null;

  /** ipywidgets says whether the kernel that made the panel lives. @param {boolean} isLive */
  live(isLive) {
    const isBack = isLive && this.trouble === "gone";
    this.trouble = isLive ? "" : "gone";
    if (isBack) this.goOn();
    this.changed();
  }

  /** Tells and asks what was lost while no kernel heard it. */
  goOn() {
    this.tell({ type: "open", by: this.id, panes: this.opened });
    const missed = different(this.model.get("asked").fields, this.store.state.fields);
    if (Object.keys(missed).length) this.change(missed);
    this.askAgain();
  }
}

/** @template K, T @param {Map<K, T>} map of which the oldest is forgotten @param {K} key @param {T} value @param {number} [most] */
function put(map, key, value, most = MOST_KEPT) {
  map.delete(key);
  map.set(key, value);
  if (map.size > most) map.delete(/** @type {K} */ (map.keys().next().value));
}

/** @param {DataView | ArrayBuffer} buffer */
const bytesOf = (buffer) =>
  buffer instanceof ArrayBuffer
    ? new Uint8Array(buffer)
    : new Uint8Array(buffer.buffer, buffer.byteOffset, buffer.byteLength);
