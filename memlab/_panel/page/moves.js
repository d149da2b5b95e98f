/**
 * What the page has changed and the kernel does not know yet. The page shows a change at once; it
 * takes over what the kernel says is set, but for changes that the kernel has not seen. So a late
 * echo never moves a slider back.
 *
 * @typedef {import("./store.js").Fields} Fields
 */

const FORGET_MS = 5000; // a change that the kernel never confirms, since another replaced it there
const INTERVAL_MS = 80; // after which a slider rests
const MOST_MS = 400; // between two messages while it moves: the page computes, the kernel follows

export class Moves {
  /** The number of the last move. */
  number = 0;
  confirmed = 0;
  /** @type {Map<string, {value: any, move: number, at: number}>} */
  open = new Map();

  /** @param {string} id of this view @param {() => number} [now] milliseconds */
  constructor(id, now = () => performance.now()) {
    this.id = id;
    this.now = now;
  }

  /** @param {Fields} changes */
  make(changes) {
    this.number += 1;
    for (const [name, value] of Object.entries(changes)) {
      this.open.set(name, { value, move: this.number, at: this.now() });
    }
  }

  /** The kernel has seen this move. @param {string} by @param {number} move */
  confirm(by, move) {
    if (by !== this.id) return;
    this.confirmed = Math.max(this.confirmed, move);
    for (const [name, change] of this.open) {
      if (change.move <= this.confirmed) this.open.delete(name);
    }
  }

  /** What is set, of what the kernel says is set. @param {Fields} fields @returns {Fields} */
  over(fields) {
    for (const [name, change] of this.open) {
      if (this.now() - change.at > FORGET_MS) this.open.delete(name);
    }
    return { ...fields, ...this.unconfirmed() };
  }

  /** @returns {Fields} */
  unconfirmed() {
    return Object.fromEntries([...this.open].map(([name, { value }]) => [name, value]));
  }

  /** Of these what is of the workload that is chosen: what came before it was sent before it. */
  ofWorkload() {
    const from = this.open.get("workload")?.move ?? 0;
    const changes = [...this.open].filter(([, { move }]) => move >= from);
    return Object.fromEntries(changes.map(([name, { value }]) => [name, value]));
  }
}

/**
 * Sends the first change at once, then what has come together: once a slider rests, and now and
 * then while it moves.
 */
export class Outbox {
  /** @type {Fields} */
  waiting = {};
  rest = /** @type {any} */ (undefined);
  latest = /** @type {any} */ (undefined);

  /**
   * @param {(changes: Fields) => void} send
   * @param {number} [interval] milliseconds
   * @param {number} [most] milliseconds
   */
  constructor(send, interval = INTERVAL_MS, most = MOST_MS) {
    this.send = send;
    this.interval = interval;
    this.most = most;
  }

  /** @param {Fields} changes */
  add(changes) {
    if ("workload" in changes) this.flush(); // what waits is of the workload before it
    Object.assign(this.waiting, changes);
    if (this.rest === undefined) this.flush();
    else this.wait();
  }

  flush() {
    const changes = this.waiting;
    this.clear();
    if (!Object.keys(changes).length) return;
    this.wait();
    this.send(changes);
  }

  wait() {
    clearTimeout(this.rest);
    this.rest = setTimeout(() => this.flush(), this.interval);
    this.latest ??= setTimeout(() => this.flush(), this.most);
  }

  /** Forgets what waits, which was sent otherwise. */
  clear() {
    clearTimeout(this.rest);
    clearTimeout(this.latest);
    this.rest = this.latest = undefined;
    this.waiting = {};
  }
}
