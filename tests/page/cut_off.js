// What cannot be seen without scrolling sideways, what leaves its drawing, and names that run into the bars after them.
const found = [];
if (document.documentElement.scrollWidth > innerWidth) found.push(`page: ${document.documentElement.scrollWidth} of ${innerWidth}`);
for (const node of document.querySelectorAll('.scroll')) {
  if (node.checkVisibility() && node.scrollWidth > node.clientWidth) found.push(`${node.ariaLabel}: ${node.scrollWidth} of ${node.clientWidth}`);
}
const box = (node) => node.getBoundingClientRect();
for (const text of document.querySelectorAll('.filled svg text')) {
  const drawing = box(text.closest('svg'));
  if (box(text).left < drawing.left - 1 || box(text).right > drawing.right + 1) found.push(`outside: ${text.textContent}`);
}
for (const row of document.querySelectorAll('[data-peer]')) {
  const bars = [...row.querySelectorAll('.track')].map((bar) => box(bar).left);
  if (bars.length > 0 && box(row.querySelector('text')).right > Math.min(...bars)) found.push(`over its bars: ${row.dataset.peer}`);
}
return found;
