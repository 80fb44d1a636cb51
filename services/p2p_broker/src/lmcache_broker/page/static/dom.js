// Elements are made one by one: no text is ever read as markup.
const SVG = 'http://www.w3.org/2000/svg';

function fill(node, attributes, children) {
  for (const [name, value] of Object.entries(attributes)) if (value !== null && value !== undefined) node.setAttribute(name, value);
  for (const child of children) if (child !== null) node.append(child);
  return node;
}

export const html = (name, attributes = {}, ...children) => fill(document.createElement(name), attributes, children);
export const svg = (name, attributes = {}, ...children) => fill(document.createElementNS(SVG, name), attributes, children);
/** A name that lines may break behind its dashes and dots. The whole name is the title. */
export const breakable = (tag, title, text) => html(tag, { title }, ...text.split(/(?<=[-.])/).flatMap((part, i) => (i === 0 ? [part] : [html('wbr'), part])));
export const nothing = (text) => html('p', { class: 'note' }, text);

/** Replace content, except under a selection. Focus, scroll positions and unfolded parts are kept. */
export function replace(place, ...content) {
  const selected = getSelection();
  if (!selected.isCollapsed && place.contains(selected.anchorNode)) return;
  const keyed = () => [...place.querySelectorAll('[data-key]')];
  const focused = place.contains(document.activeElement) ? document.activeElement.dataset.key : undefined;
  const before = new Map(keyed().map((node) => [node.dataset.key, [node.scrollLeft, node.scrollTop, node.open]]));
  place.replaceChildren(...content);
  for (const node of keyed()) {
    const [left, top, isOpen] = before.get(node.dataset.key) ?? [0, 0, false];
    if (isOpen) node.open = true;
    if (left || top) node.scrollTo(left, top);
    if (node.dataset.key === focused) node.focus({ preventScroll: true });
  }
}

/** A bar that shows a share; the text next to it says the same. */
export const gauge = (value, max, colour) =>
  svg('svg', { class: 'gauge', viewBox: '0 0 100 6', preserveAspectRatio: 'none', 'aria-hidden': 'true' },
    svg('rect', { class: 'track', width: 100, height: 6 }),
    svg('rect', { class: colour, width: (100 * Math.min(1, value / Math.max(1, max))).toFixed(2), height: 6 }));

/** A table. `columns`: [title, cell(row), is it a number?, is it hidden on a small screen?]; `keyOf` returns a row's key. */
export function table(caption, columns, rows, keyOf) {
  const kind = (isNumber, isMinor) => [isNumber ? 'number' : '', isMinor ? 'minor' : ''].join(' ').trim() || null;
  const cell = (row, [, value, isNumber, isMinor], i) =>
    html(i === 0 ? 'th' : 'td', { scope: i === 0 ? 'row' : null, class: kind(isNumber, isMinor) }, value(row));
  const head = columns.map(([title, , isNumber, isMinor]) => html('th', { scope: 'col', class: kind(isNumber, isMinor) }, title));
  const body = rows.map((row) => html('tr', { 'data-row': keyOf(row) }, ...columns.map((column, i) => cell(row, column, i))));
  const scroll = { class: 'scroll', tabindex: '0', role: 'region', 'aria-label': caption, 'data-key': caption };
  return html('div', scroll, html('table', {}, html('caption', {}, caption), html('thead', {}, html('tr', {}, ...head)), html('tbody', {}, ...body)));
}
