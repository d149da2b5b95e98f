/** The types of what the page uses of preact.js: Preact, its hooks and htm's `html`. */

/** What `html` returns: a description of elements. */
export interface VNode {
  type: unknown;
  props: Record<string, unknown>;
  key: unknown;
}

export type Child = VNode | string | number | bigint | boolean | null | undefined | Child[];

/** A function that returns elements for its properties. */
export type FunctionComponent<P = Record<string, unknown>> = (
  props: P & { children?: Child },
) => Child;

/** Elements from a tagged template: html`<p class=${name}>${text}</p>`. */
export function html(strings: TemplateStringsArray, ...values: unknown[]): VNode | VNode[];

export function h<P>(
  type: string | FunctionComponent<P>,
  props: (P & { key?: unknown }) | null,
  ...children: Child[]
): VNode;

/** Shows elements in a parent; `null` takes away what is there. */
export function render(elements: Child, parent: Element | DocumentFragment): void;

export interface Ref<T> {
  current: T;
}

type Effect = () => void | (() => void);
type Inputs = readonly unknown[];

export function useState<S>(initial: S | (() => S)): [S, (next: S | ((before: S) => S)) => void];
/** After the browser has painted. */
export function useEffect(effect: Effect, inputs?: Inputs): void;
/** Before the browser paints. */
export function useLayoutEffect(effect: Effect, inputs?: Inputs): void;
export function useRef<T>(initial: T): Ref<T>;
export function useMemo<T>(make: () => T, inputs?: Inputs): T;
export function useCallback<F extends (...values: never[]) => unknown>(
  callback: F,
  inputs?: Inputs,
): F;
