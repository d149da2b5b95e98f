/**
 * A replay of PyTorch's CUDA caching allocator: the same rules as `memlab/memory/replay.py`, which
 * explains them and names their source. Sizes and addresses count blocks of 512 B.
 */

const MIB = 2 ** 20;
export const BLOCK_BYTES = 512;
const SMALL_REQUEST = MIB / BLOCK_BYTES;
const SMALL_SEGMENT = (2 * MIB) / BLOCK_BYTES;
const LARGE_REQUEST = (10 * MIB) / BLOCK_BYTES;
const LARGE_SEGMENT = (20 * MIB) / BLOCK_BYTES;
const SEGMENT_GRANULE = (2 * MIB) / BLOCK_BYTES;
const UNLIMITED = 2 ** 40;

/** @param {number} size @param {number} granule */
const roundUp = (size, granule) => Math.ceil(size / granule) * granule;

/** Free blocks in the order of best fit: the smallest first, of equal ones the lowest. */
class FreeList {
  constructor() {
    /** @type {number[]} */ this.sizes = [];
    /** @type {number[]} */ this.starts = [];
  }

  /** The first free block that is not before this one. @param {number} size @param {number} start */
  at(size, start) {
    const { sizes, starts } = this;
    let low = 0;
    let high = sizes.length;
    while (low < high) {
      const middle = (low + high) >> 1;
      const isBefore = sizes[middle] < size || (sizes[middle] === size && starts[middle] < start);
      if (isBefore) low = middle + 1;
      else high = middle;
    }
    return low;
  }

  /** @param {number} size @param {number} start */
  add(size, start) {
    const index = this.at(size, start);
    this.sizes.splice(index, 0, size);
    this.starts.splice(index, 0, start);
  }

  /** @param {number} index */
  remove(index) {
    this.sizes.splice(index, 1);
    this.starts.splice(index, 1);
  }
}

/** A pool whose segments are allocated and freed as a whole. */
class SegmentPool {
  /** @param {number} smallestRest splits a free block if at least so much remains */
  constructor(smallestRest) {
    this.reserved = 0;
    this.smallestRest = smallestRest;
    this.free = new FreeList();
    /** @type {Map<number, number>} */ this.sizeAt = new Map();
    /** @type {Map<number, number>} */ this.startOfEnd = new Map();
    /** @type {Map<number, number>} */ this.segments = new Map();
    this.bottom = 0; // each segment lies below all earlier ones
  }

  /** @param {number} size @returns {[number, number] | null} start and size of a block */
  take(size) {
    const index = this.free.at(size, -Infinity);
    return index < this.free.sizes.length ? this.cut(index, size) : null;
  }

  /** @param {number} index @param {number} size @returns {[number, number]} */
  cut(index, size) {
    const start = this.free.starts[index];
    const whole = this.free.sizes[index];
    this.free.remove(index);
    this.sizeAt.delete(start);
    const rest = whole - size;
    if (rest < this.smallestRest) {
      this.startOfEnd.delete(start + whole);
      return [start, whole];
    }
    this.sizeAt.set(start + size, rest);
    this.startOfEnd.set(start + whole, start + size);
    this.free.add(rest, start + size);
    return [start, size];
  }

  /** Adds a free block and joins it with free neighbours. @param {number} start @param {number} size */
  give(start, size) {
    const after = this.sizeAt.get(start + size);
    if (after !== undefined) {
      this.sizeAt.delete(start + size);
      this.free.remove(this.free.at(after, start + size));
      size += after;
    }
    const before = this.startOfEnd.get(start);
    if (before !== undefined) {
      this.startOfEnd.delete(start);
      this.free.remove(this.free.at(start - before, before));
      size += start - before;
      start = before;
    }
    this.sizeAt.set(start, size);
    this.startOfEnd.set(start + size, start);
    this.free.add(size, start);
  }

  /** Takes a free block out. @param {number} start @param {number} size */
  withdraw(start, size) {
    this.free.remove(this.free.at(size, start));
    this.sizeAt.delete(start);
    this.startOfEnd.delete(start + size);
  }

  /** @param {number} size @param {number} room @returns {boolean} whether there was room */
  grow(size, room) {
    let whole = LARGE_SEGMENT;
    if (size <= SMALL_REQUEST) whole = SMALL_SEGMENT;
    else if (size >= LARGE_REQUEST) whole = roundUp(size, SEGMENT_GRANULE);
    if (whole > room) return false;

    this.bottom -= whole + 1; // the gap prevents joining blocks of two segments
    this.segments.set(this.bottom, whole);
    this.reserved += whole;
    this.give(this.bottom, whole);
    return true;
  }

  /** Frees every segment without a block in use. */
  flush() {
    for (const [start, size] of this.freeBlocks()) {
      if (this.segments.get(start) === size) {
        this.withdraw(start, size);
        this.segments.delete(start);
        this.reserved -= size;
      }
    }
  }

  /** @returns {[number, number][]} start and size, in the order of best fit */
  freeBlocks() {
    return this.free.starts.map((start, index) => [start, this.free.sizes[index]]);
  }
}

/** A pool of one endless segment, of which whole pages are mapped and unmapped. */
class ExpandablePool extends SegmentPool {
  /** @param {number} page */
  constructor(page) {
    super(1);
    this.page = page;
    /** @type {Map<number, number>} start to end, ascending */
    this.unmapped = new Map([[0, UNLIMITED]]);
  }

  /** @param {number} size @returns {[number, number] | null} */
  take(size) {
    let index = this.free.at(size, -Infinity);
    const last = this.free.sizes.length - 1;
    if (index > last) return null;
    // a free block before an unmapped range counts as large as both together
    while (index < last && this.reach(index + 1) < this.reach(index)) index += 1;
    return this.cut(index, size);
  }

  /** @param {number} index */
  reach(index) {
    const start = this.free.starts[index];
    const end = start + this.free.sizes[index];
    return (this.unmapped.get(end) ?? end) - start;
  }

  /** @param {number} size @param {number} room @returns {boolean} */
  grow(size, room) {
    const starts = [...this.unmapped.keys()].map((gap) => this.startOfEnd.get(gap) ?? gap);
    const start = /** @type {number} */ (starts.find((at) => this.canHold(at, size)));
    let have = this.sizeAt.get(start) ?? 0;
    while (have < size) {
      const gap = start + have;
      const end = /** @type {number} */ (this.unmapped.get(gap));
      const pages = Math.min(roundUp(size - have, this.page), end - gap);
      if (pages > room) return false;
      room -= pages;
      this.map(gap, pages);
      have = /** @type {number} */ (this.sizeAt.get(start));
    }
    return true;
  }

  /** @param {number} start @param {number} size */
  canHold(start, size) {
    let end = start;
    while (end - start < size) {
      const free = this.sizeAt.get(end);
      const to = free === undefined ? this.unmapped.get(end) : end + free;
      if (to === undefined) return false;
      end = to;
    }
    return true;
  }

  /** @param {number} start @param {number} pages */
  map(start, pages) {
    const end = /** @type {number} */ (this.unmapped.get(start));
    this.unmapped.delete(start);
    if (start + pages < end) {
      this.unmapped.set(start + pages, end);
      this.unmapped = new Map([...this.unmapped].sort(([one], [other]) => one - other));
    }
    this.reserved += pages;
    this.give(start, pages);
  }

  /** Unmaps every page without a block in use. */
  flush() {
    for (const [start, size] of this.freeBlocks()) {
      const end = start + size;
      const first = roundUp(start, this.page);
      const last = Math.floor(end / this.page) * this.page;
      if (first >= last) continue;
      this.withdraw(start, size);
      if (start < first) this.give(start, first - start);
      if (last < end) this.give(last, end - last);
      this.reserved -= last - first;
      this.unmapped.set(first, last);
    }
    /** @type {Map<number, number>} */
    const joined = new Map();
    let begin = NaN;
    let until = NaN;
    for (const [start, end] of [...this.unmapped].sort(([one], [other]) => one - other)) {
      if (start !== until) begin = start;
      joined.set(begin, end);
      until = end;
    }
    this.unmapped = joined;
  }
}

/**
 * What the caching allocator holds after each allocation and free.
 *
 * @param {object} run
 * @param {ArrayLike<number>} run.block known from its allocation to its free, (events,)
 * @param {ArrayLike<number>} run.bytes positive for an allocation, negative for a free, (events,)
 * @param {ArrayLike<number> | null} run.stream of each event; null if there is one stream
 * @param {number[]} run.flushBefore events before which cached segments are given back
 * @param {boolean} run.expandable whether segments grow by pages
 * @param {number | null} run.limitBytes null for no limit
 * @param {boolean} [run.judgeOnly] whether only `failed` is asked for
 * @returns {{reserved: Float64Array, allocated: Float64Array, failed: boolean}} bytes, (events,);
 *     whether an allocation could not be served, with which the replay ends
 */
export function replay(run) {
  const count = run.block.length;
  const size = run.judgeOnly ? 0 : count;
  const reserved = new Float64Array(size);
  const allocated = new Float64Array(size);
  const limit = run.limitBytes === null ? UNLIMITED : Math.floor(run.limitBytes / BLOCK_BYTES);
  const flushBefore = new Set(run.flushBefore);
  /** @type {Map<number, SegmentPool>} by stream and kind */
  const pools = new Map();
  /** @type {Map<number, {pool: SegmentPool, start: number, size: number}>} */
  const live = new Map();
  let held = 0;
  let inUse = 0;

  const recount = () => {
    held = 0;
    for (const pool of pools.values()) held += pool.reserved;
  };
  const flush = () => {
    for (const pool of pools.values()) pool.flush();
    recount();
  };
  /** @param {number} blocks @param {number} stream */
  const poolFor = (blocks, stream) => {
    const isSmall = blocks <= SMALL_REQUEST;
    const key = 2 * stream + (isSmall ? 1 : 0);
    let pool = pools.get(key);
    if (!pool) {
      if (run.expandable) pool = new ExpandablePool(isSmall ? SMALL_SEGMENT : LARGE_SEGMENT);
      else pool = new SegmentPool(isSmall ? 1 : SMALL_REQUEST + 1);
      pools.set(key, pool);
    }
    return pool;
  };

  for (let event = 0; event < count; event += 1) {
    if (flushBefore.has(event)) flush();
    const bytes = run.bytes[event];
    if (bytes > 0) {
      const blocks = Math.ceil(bytes / BLOCK_BYTES);
      const pool = poolFor(blocks, run.stream ? run.stream[event] : 0);
      let found = pool.take(blocks);
      if (!found) {
        if (!pool.grow(blocks, limit - held)) {
          flush();
          pool.grow(blocks, limit - held);
        }
        recount();
        found = pool.take(blocks);
      }
      if (!found) {
        reserved.fill(held * BLOCK_BYTES, event);
        allocated.fill(inUse * BLOCK_BYTES, event);
        return { reserved, allocated, failed: true };
      }
      live.set(run.block[event], { pool, start: found[0], size: found[1] });
      inUse += found[1];
    } else if (bytes < 0) {
      const known = /** @type {{pool: SegmentPool, start: number, size: number}} */ (
        live.get(run.block[event])
      );
      live.delete(run.block[event]);
      known.pool.give(known.start, known.size);
      inUse -= known.size;
    }
    if (size) {
      reserved[event] = held * BLOCK_BYTES;
      allocated[event] = inUse * BLOCK_BYTES;
    }
  }
  return { reserved, allocated, failed: false };
}
