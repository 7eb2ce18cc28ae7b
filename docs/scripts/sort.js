// Tables inside <div class="sortable">: a button in each heading sorts by its column, up and then down, and a field above the
// table hides the rows that lack a word. Columns that are aligned to the right are compared as numbers.
for (const area of document.querySelectorAll(".sortable")) {
  const table = area.querySelector("table");
  const body = table.tBodies[0];
  const headings = [...table.tHead.rows[0].cells];
  const order = new Intl.Collator("en", { numeric: true });

  const sortBy = (column) => {
    const heading = headings[column];
    const up = heading.ariaSort !== "ascending";
    const numbers = heading.style.textAlign === "right";
    const key = (row) => {
      const text = row.cells[column].textContent;
      return numbers ? parseFloat(text) : text;
    };
    const rows = [...body.rows].map((row) => [key(row), row]);
    rows.sort(([a], [b]) => {
      // What is no number, such as "-", comes last in both directions.
      if (numbers && (isNaN(a) || isNaN(b))) return isNaN(a) - isNaN(b);
      return (numbers ? a - b : order.compare(a, b)) * (up ? 1 : -1);
    });
    body.append(...rows.map(([, row]) => row));
    for (const other of headings) other.ariaSort = "none";
    heading.ariaSort = up ? "ascending" : "descending";
  };

  headings.forEach((heading, column) => {
    const button = document.createElement("button");
    button.type = "button";
    button.append(...heading.childNodes);
    button.onclick = () => sortBy(column);
    heading.append(button);
    heading.ariaSort = "none";
  });

  const field = document.createElement("input");
  field.type = "search";
  field.placeholder = "Show rows with …, for example: 64 v32-fp8";
  field.ariaLabel = "Show rows with these words";
  const count = document.createElement("output");
  const show = () => {
    const words = field.value.toLowerCase().split(/\s+/).filter(Boolean);
    let shown = 0;
    for (const row of body.rows) {
      const cells = [...row.cells].map((cell) => cell.textContent.trim().toLowerCase());
      // A number must be a whole cell, or a word of one: 16 is not 16384.
      const found = (word) => cells.some((text) => (/^[\d.]+$/.test(word) ? text.split(/\s+/).includes(word) : text.includes(word)));
      row.hidden = !words.every(found);
      shown += !row.hidden;
    }
    count.textContent = `${shown} of ${body.rows.length} rows`;
  };
  field.oninput = show;
  show();
  const bar = document.createElement("div");
  bar.className = "sortable-filter";
  bar.append(field, count);
  area.prepend(bar);
}
