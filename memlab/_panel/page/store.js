/**
 * What a person has set on the page: one state, with undo and a link that holds it.
 *
 * @typedef {Record<string, any>} Fields every setting, named as in Python: `batch_size`,
 *     `memory_limit`, `workload`; a number box may hold a wrong text
 *
 * @typedef {object} PageState
 * @property {Fields} fields
 * @property {"category" | "module"} view how the timeline is stacked
 * @property {boolean} isWithBefore whether it is compared with the settings before the last move
 * @property {number | null} instant that was chosen in the timeline; null for the peak
 * @property {string | null} module whose memory is looked at; null for all
 */

/** How a picture is looked at. */
export const AT_FIRST = {
  view: /** @type {const} */ ("category"),
  isWithBefore: false,
  instant: null,
  module: null,
};

const SAME_MOVE_MS = 700; // moves of one control within this time are undone together
const MOST_UNDONE = 100;

export class Store {
  /**
   * @param {PageState} state
   * @param {(changes: Fields) => void} [moved] is told what a person has changed
   */
  constructor(state, moved = () => {}) {
    this.state = state;
    this.moved = moved;
    /** @type {Fields[]} */ this.past = [];
    /** @type {Fields[]} */ this.future = [];
    /** @type {Fields | null} before the last move */ this.before = null;
    this.last = { what: "", at: -Infinity };
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

  /** A person's change. @param {Fields} changes */
  move(changes) {
    const differing = different(this.state.fields, changes);
    if (!Object.keys(differing).length) return;
    this.#note(Object.keys(differing).join());
    this.moved(differing);
    this.look({ fields: { ...this.state.fields, ...differing }, instant: null });
  }

  /**
   * A change that came from elsewhere, which can be undone too.
   *
   * @param {Fields} fields all of them
   * @param {string} by whom; "search 3" is one search, all of whose changes are undone together
   */
  receive(fields, by) {
    const names = Object.keys(different(this.state.fields, fields));
    const isSearch = by.startsWith("search");
    if (names.length) this.#note(isSearch ? by : `${by} ${names}`, isSearch);
    this.adopt(fields);
  }

  /** The same settings as the kernel writes them, which is no change. @param {Fields} fields all of them */
  adopt(fields) {
    const isSame = !Object.keys(different(this.state.fields, fields)).length;
    this.look(isSame ? { fields } : { fields, instant: null });
  }

  undo() {
    this.#go(this.past, this.future);
  }

  redo() {
    this.#go(this.future, this.past);
  }

  /** @param {string} what @param {boolean} [isOneMove] however long it takes */
  #note(what, isOneMove = false) {
    const now = performance.now();
    const isRecent = isOneMove || now - this.last.at < SAME_MOVE_MS;
    const isSameMove = what === this.last.what && isRecent;
    this.last = { what, at: now };
    if (isSameMove) return;
    this.past = [...this.past.slice(1 - MOST_UNDONE), this.state.fields];
    this.future = [];
    this.before = this.state.fields;
  }

  /** @param {Fields[]} from @param {Fields[]} to */
  #go(from, to) {
    const fields = from.pop();
    if (!fields) return;
    const now = this.state.fields;
    to.push(now);
    this.last.what = "";
    this.before = now;
    this.moved(different(now, fields));
    this.look({ fields: { ...now, ...fields }, instant: null });
  }
}

/** The fields whose value is another than now. @param {Fields} now @param {Fields} then @returns {Fields} */
export function different(now, then) {
  return Object.fromEntries(
    Object.entries(then).filter(
      ([name, value]) => JSON.stringify(now[name]) !== JSON.stringify(value),
    ),
  );
}

const LINKED = ["batch_size", "accumulation_steps", "memory_budget", "memory_limit"];

/** The part of a link after "#". @param {PageState} state */
export function toLink({ fields }) {
  const linked = LINKED.filter((name) => name !== "memory_limit" || fields[name]);
  return `#${new URLSearchParams(linked.map((name) => [name, String(fields[name])]))}`;
}

/**
 * The state that a link names, as far as its values are allowed.
 *
 * @param {string} link
 * @param {PageState} state
 * @returns {PageState}
 */
export function fromLink(link, state) {
  const named = new URLSearchParams(link.replace(/^#/, ""));
  const fields = { ...state.fields };
  for (const name of ["batch_size", "accumulation_steps"]) {
    const number = Number(named.get(name));
    if (Number.isSafeInteger(number) && number > 0) fields[name] = number;
  }
  const budget = Number(named.get("memory_budget") ?? NaN);
  if (budget >= 0 && budget <= 1) fields.memory_budget = budget;
  fields.memory_limit = named.get("memory_limit") ?? fields.memory_limit;
  return { ...state, fields };
}
