// Elements are made one by one: no text is ever read as markup.
const SVG = 'http://www.w3.org/2000/svg';

function fill(node, attributes, children) {
  for (const [name, value] of Object.entries(attributes)) if (value !== null && value !== undefined) node.setAttribute(name, value);
  for (const child of children) if (child !== null) node.append(child);
  return node;
}

export const html = (name, attributes = {}, ...children) => fill(document.createElement(name), attributes, children);
export const svg = (name, attributes = {}, ...children) => fill(document.createElementNS(SVG, name), attributes, children);

/** Puts new content in the place of the old; who was at something there by keyboard stays at it. */
export function replace(place, ...content) {
  const key = place.contains(document.activeElement) ? document.activeElement.dataset.key : undefined;
  place.replaceChildren(...content);
  if (key !== undefined) [...place.querySelectorAll('[data-key]')].find((node) => node.dataset.key === key)?.focus();
}

/** A table. `columns`: [title, cell(row), is it a number?]; `keyOf` names a row for those who look for it. */
export function table(caption, columns, rows, keyOf) {
  const cell = (row, [, value, isNumber], i) =>
    html(i === 0 ? 'th' : 'td', { scope: i === 0 ? 'row' : null, class: isNumber ? 'number' : null }, value(row));
  const head = columns.map(([title, , isNumber]) => html('th', { scope: 'col', class: isNumber ? 'number' : null }, title));
  const body = rows.map((row) => html('tr', { 'data-row': keyOf(row) }, ...columns.map((column, i) => cell(row, column, i))));
  const scroll = { class: 'scroll', tabindex: '0', role: 'region', 'aria-label': caption, 'data-key': caption };
  return html('div', scroll, html('table', {}, html('caption', {}, caption), html('thead', {}, html('tr', {}, ...head)), html('tbody', {}, ...body)));
}
