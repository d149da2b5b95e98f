/**
 * What a person has set on the page: one state, with undo and a link that holds it.
 *
 * @typedef {import("./estimate.js").Setting} Setting
 *
 * @typedef {object} PageState
 * @property {Setting} setting
 * @property {string} limit as typed; "" is what the device can hold
 * @property {"category" | "module"} view how the timeline is stacked
 * @property {number | null} instant that was chosen in the timeline; null for the peak
 * @property {string | null} module whose memory is looked at; null for all
 */

const SAME_MOVE_MS = 700; // moves of one slider within this time are undone together
const MOST_UNDONE = 100;

export class Store {
  /** @param {PageState} state */
  constructor(state) {
    this.state = state;
    /** @type {PageState[]} */ this.past = [];
    /** @type {PageState[]} */ this.future = [];
    /** @type {Setting | null} before the last move */ this.before = null;
    this.moved = { what: "", at: -Infinity };
    /** @type {Set<() => void>} */ this.listeners = new Set();
  }

  /** @param {() => void} listener @returns {() => void} ends it */
  subscribe(listener) {
    this.listeners.add(listener);
    return () => this.listeners.delete(listener);
  }

  /** Changes what is looked at, which is not undone. @param {Partial<PageState>} changes */
  look(changes) {
    this.state = { ...this.state, ...changes };
    this.listeners.forEach((listener) => listener());
  }

  /** @param {Partial<Setting>} changes */
  move(changes) {
    this.#note(Object.keys(changes).join());
    const setting = { ...this.state.setting, ...changes };
    this.look({ setting, instant: null });
  }

  /** @param {string} limit */
  setLimit(limit) {
    this.#note("limit");
    this.look({ limit });
  }

  undo() {
    this.#go(this.past, this.future);
  }

  redo() {
    this.#go(this.future, this.past);
  }

  /** @param {string} what */
  #note(what) {
    const now = performance.now();
    const isSameMove = what === this.moved.what && now - this.moved.at < SAME_MOVE_MS;
    this.moved = { what, at: now };
    if (isSameMove) return;
    this.past = [...this.past.slice(1 - MOST_UNDONE), this.state];
    this.future = [];
    this.before = this.state.setting;
  }

  /** @param {PageState[]} from @param {PageState[]} to */
  #go(from, to) {
    const state = from.pop();
    if (!state) return;
    to.push(this.state);
    this.moved.what = "";
    this.before = this.state.setting;
    this.look({ setting: state.setting, limit: state.limit, instant: null });
  }
}

/** The part of a link after "#". @param {PageState} state */
export function toLink({ setting, limit }) {
  const fields = new URLSearchParams({
    batch_size: String(setting.batchSize),
    accumulation_steps: String(setting.accumulationSteps),
    memory_budget: String(setting.memoryBudget),
  });
  if (limit) fields.set("memory_limit", limit);
  return `#${fields}`;
}

/**
 * The state that a link names, as far as its values are allowed.
 *
 * @param {string} link
 * @param {PageState} state
 * @returns {PageState}
 */
export function fromLink(link, state) {
  const fields = new URLSearchParams(link.replace(/^#/, ""));
  const setting = { ...state.setting };
  const batch = Number(fields.get("batch_size"));
  const steps = Number(fields.get("accumulation_steps"));
  const budget = Number(fields.get("memory_budget") ?? NaN);
  if (Number.isSafeInteger(batch) && batch > 0) setting.batchSize = batch;
  if (Number.isSafeInteger(steps) && steps > 0) setting.accumulationSteps = steps;
  if (budget >= 0 && budget <= 1) setting.memoryBudget = budget;
  return { ...state, setting, limit: fields.get("memory_limit") ?? state.limit };
}
