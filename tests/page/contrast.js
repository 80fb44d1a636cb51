// Every piece of text that can be seen, and the contrast of its colour with what lies behind it (WCAG 2.2, 1.4.3).
const channel = (value) => (value <= 0.04045 ? value / 12.92 : ((value + 0.055) / 1.055) ** 2.4);
const parts = (colour) => colour.match(/[\d.]+/g).map(Number);
const luminance = (colour) => {
  const [r, g, b] = parts(colour).map((value) => channel(value / 255));
  return 0.2126 * r + 0.7152 * g + 0.0722 * b;
};
const behind = (node) => {
  for (let at = node; at !== null; at = at.parentElement) {
    const colour = getComputedStyle(at).backgroundColor;
    if ((parts(colour)[3] ?? 1) === 1) return colour;
  }
  return 'rgb(255, 255, 255)';
};
const found = [];
const walker = document.createTreeWalker(document.body, NodeFilter.SHOW_TEXT);
while (walker.nextNode()) {
  const node = walker.currentNode.parentElement;
  if (walker.currentNode.textContent.trim() === '' || !node.checkVisibility() || node.closest('title, noscript') !== null) continue;
  const colour = node.namespaceURI.endsWith('/svg') ? getComputedStyle(node).fill : getComputedStyle(node).color;
  const [light, dark] = [luminance(colour), luminance(behind(node))].sort((a, b) => b - a);
  found.push([walker.currentNode.textContent.trim(), (light + 0.05) / (dark + 0.05)]);
}
return found;
