/* What a reader would stumble over: what is wider than the window, axes without a title, legends on lines, cut texts. */
const wide = document.documentElement.clientWidth, found = [];
const box = (element) => element.getBoundingClientRect();
const meet = (a, b) => a.left < b.right && b.left < a.right && a.top < b.bottom && b.top < a.bottom;
if (document.documentElement.scrollWidth > wide) found.push(`the page is ${document.documentElement.scrollWidth} wide`);
for (const element of document.querySelectorAll('body *')) {
  const inside = element.parentElement.closest('.scroll') || element.closest('svg'), { left, right, width } = box(element);
  if (!inside && width && (right > wide + 1 || left < -1)) found.push(`${element.tagName} ${element.id} from ${left} to ${right}`);
}
for (const chart of document.querySelectorAll('svg[role=img]')) {
  const name = chart.getAttribute('aria-label') || 'a chart without a label', all = (what) => [...chart.querySelectorAll(what)];
  for (const axis of ['axis-x', 'axis-y']) {
    if (!all(`.${axis}, [id$="${axis}"]`).some((title) => title.textContent.trim())) found.push(`${name}: no title of ${axis}`);
  }
  const legends = [...chart.parentElement.querySelectorAll('.key'), ...all('[id*="legend_"]')].map(box);
  // Marks have a tip each; lines and bars of a legend and the lines of a grid are not what is plotted.
  const lines = all('.series, [id*="line2d_"]').filter((line) => !line.closest('[id*="legend_"], [id*="matplotlib.axis"]'));
  const marks = [...lines, ...all('title').map((tip) => tip.parentElement)].map(box);
  if (legends.some((legend) => marks.some((mark) => meet(legend, mark)))) found.push(`${name}: the legend is on the lines`);
  const outer = box(chart);
  for (const text of all('text')) {
    const { left, right, top, bottom } = box(text);
    const within = left >= outer.left - 3 && right <= outer.right + 3 && top >= outer.top - 3 && bottom <= outer.bottom + 3;
    if (!within) found.push(`${name}: "${text.textContent}" is cut off`);
  }
}
return found;
